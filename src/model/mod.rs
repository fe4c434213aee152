//! The decoder: ModelSpec, ParamTable, blocks forward and backward, head, weight files.
