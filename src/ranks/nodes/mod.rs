//! Worlds on several nodes, with equally many ranks on each, numbered node by node.
//!
//! Every rank has one TCP connection to the *hub*, a few threads in rank 0's process. So all ranks notice the end of any process at once, whichever
//! program started it. Within a node, ranks share memory as in a world of one node. Everything for other nodes goes through the hub: exchanged host
//! bytes, agreements, failures, and the CPU tensors that group leaders on different nodes send each other. GPU tensors go over NCCL, which gets its
//! ids through the control plane.
//!
//! Each rank has its own connection, rather than one per node, because a leader cannot watch its node's processes under torchrun or Slurm, and
//! because a group's leader need not be its node's first rank. The price is one socket and two threads per rank in rank 0's process.
//!
//! | file | what it is |
//! |---|---|
//! | `join` | how ranks join |
//! | `auth` | how they authenticate |
//! | `layout` | which rank is on which node; what nodes compare when they join |
//! | `hub`, `switch` | rank 0's threads; the hub's decisions |
//! | `client`, `inbox` | a rank's end of the connection; its received messages |
//! | `connection`, `frame` | heartbeats and timeouts; the wire format |
//! | `control` | the control plane |
//! | `group` | collectives on CPU tensors |
//! | `interface` | the network interface towards rank 0 |

mod auth;
mod client;
mod connection;
mod control;
mod frame;
mod group;
mod hub;
mod inbox;
mod interface;
mod join;
mod layout;
mod switch;
#[cfg(test)]
pub(super) mod testing;
#[cfg(test)]
mod tests;

pub use auth::require_token;
pub(super) use control::NodesControl;
pub(super) use group::NodesGroup;
pub use interface::{NCCL_INTERFACE_VARIABLE, nccl_interface};
pub(super) use join::meet;
