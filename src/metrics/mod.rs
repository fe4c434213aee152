//! What is measured, how it reduces over ranks and where it is written.
