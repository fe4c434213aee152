//! The network interface on the route to rank 0, which NCCL should use, too.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

/// Environment variable with the interfaces that NCCL uses between nodes.
pub const NCCL_INTERFACE_VARIABLE: &str = "NCCL_SOCKET_IFNAME";

/// The interface that NCCL should use towards `host`, unless the user sets one. `None` if the route is unknown or stays on this host.
pub fn nccl_interface(host: &str, port: u16) -> Option<String> {
    let found = Interface::towards(host, port).filter(|interface| !interface.address.is_loopback())?;
    Some(found.name)
}

/// A network interface and this host's address on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Interface {
    /// The kernel's name of the interface.
    pub(super) name: String,
    /// This host's address on the interface.
    pub(super) address: IpAddr,
}

impl Interface {
    /// The interface of the route to `host`; `None` if the name cannot be resolved or there is no route. Sends no packets.
    pub(super) fn towards(host: &str, port: u16) -> Option<Self> {
        let any: IpAddr = Ipv4Addr::UNSPECIFIED.into();
        let of = |any: IpAddr| {
            let socket = UdpSocket::bind((any, 0)).ok()?;
            socket.connect((host, port.max(1))).ok()?; // only queries the routing table
            Some(socket.local_addr().ok()?.ip())
        };
        let address = of(any).or_else(|| of(Ipv6Addr::UNSPECIFIED.into()))?;
        Some(Self { name: name_of(address)?, address })
    }
}

/// The name of the interface with an address.
fn name_of(address: IpAddr) -> Option<String> {
    let mut first = std::ptr::null_mut();
    // SAFETY: the list is written on success only, and freed below.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return None;
    }
    let mut found = None;
    let mut entry = first;
    while !entry.is_null() && found.is_none() {
        // SAFETY: the entry is in the list; its name ends with NUL, and its address, if any, has the type given by its family.
        unsafe {
            if ip_of((*entry).ifa_addr) == Some(address) {
                found = Some(CStr::from_ptr((*entry).ifa_name).to_string_lossy().into_owned());
            }
            entry = (*entry).ifa_next;
        }
    }
    // SAFETY: the list is getifaddrs' own and not used again.
    unsafe { libc::freeifaddrs(first) };
    found
}

/// # Safety
/// `address` is null or a socket address of the type given by its family.
unsafe fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller's promise; null is checked first.
    unsafe {
        match i32::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let inet = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(IpAddr::from(u32::from_be(inet.sin_addr.s_addr).to_be_bytes()))
            }
            libc::AF_INET6 => {
                let inet = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(IpAddr::from(inet.sin6_addr.s6_addr))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_route_to_this_host_is_its_loopback_interface() {
        let interface = Interface::towards("127.0.0.1", 80).unwrap();
        assert_eq!((interface.name.as_str(), interface.address), ("lo", IpAddr::from(Ipv4Addr::LOCALHOST)));
        assert_eq!(Interface::towards("name.that.does.not.exist.invalid", 80), None);
    }
}
