//! Processes and what they say to one another: World, Mesh, Collective, rendezvous.
