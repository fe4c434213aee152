//! The tensor operations of a decoder, each with its backward. Knows nothing of ranks.
