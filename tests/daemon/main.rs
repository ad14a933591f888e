//! The daemon, with real sockets and processes: offers, attaches, leases, bad peers, folders, the program itself.
//! The protocol is spoken by hand here, so that both good and bad peers are in reach.

#![allow(clippy::unwrap_used, unreachable_pub)]

mod anchors;
mod children;
mod engines;
mod folder;
mod leases;
mod offers;
mod peers;
mod program;
mod sets;
mod support;
mod workers;
