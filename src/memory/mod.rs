//! The arena, the host pool and the ledger of who holds what.
