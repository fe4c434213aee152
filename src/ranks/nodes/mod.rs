//! Worlds on several nodes: equally many ranks on each, numbered node by node.
//!
//! Every rank has one TCP connection to the *hub*, a few threads of rank 0's process. So the end of any process is seen by all at
//! once, whoever started it. Within a node ranks share memory as they do in a world of one node; what is for other nodes goes
//! through the hub: exchanges of host bytes, verdicts, failures, and the CPU tensors that the leaders of a group's nodes send.
//! GPUs' tensors go over NCCL, which the control plane tells its ids.
//!
//! Each rank has a connection of its own, rather than one per node, because a leader cannot watch its node's processes under torchrun
//! or Slurm, and because a group's leader need not be its node's first rank. The price is one socket and two threads per rank in rank
//! 0's process.
//!
//! | file | what it is |
//! |---|---|
//! | `join` | how ranks meet |
//! | `auth` | how they prove that they belong together |
//! | `layout` | which rank is where; what nodes compare when they meet |
//! | `hub`, `switch` | rank 0's threads; what they decide |
//! | `client`, `inbox` | a rank's end; what has come for it |
//! | `connection`, `frame` | signs of life and silence; what is on the wire |
//! | `control` | the control plane on top |
//! | `group` | collectives on CPU tensors on top |
//! | `interface` | the network interface that leads to rank 0 |

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
