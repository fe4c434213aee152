//! Who holds how many bytes, where: for out-of-memory messages, the plan's check and the metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory that is counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub enum Place {
    /// The memory that tensors are computed in.
    Device,
    /// Host memory that holds what is off the device.
    Host,
}

/// The process-wide account of bytes by owner. It holds counts only, never memory.
#[derive(Debug)]
pub struct Ledger;

/// Most bytes held at once since [`Ledger::take_peak`], by place.
static PEAKS: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
static ACCOUNTS: Mutex<Accounts> = Mutex::new(BTreeMap::new());

/// Bytes by place and owner.
type Accounts = BTreeMap<(Place, &'static str), usize>;

impl Ledger {
    /// Says that `owner` now holds `bytes` in `place`; 0 closes the account.
    pub fn set(owner: &'static str, place: Place, bytes: usize) {
        Self::change(owner, place, |_| bytes);
    }

    /// Every open account, by place and owner.
    pub fn report() -> Vec<(Place, &'static str, usize)> {
        accounts().iter().map(|(&(place, owner), &bytes)| (place, owner, bytes)).collect()
    }

    /// Bytes held in `place` by all owners together.
    pub fn total(place: Place) -> usize {
        total_of(&accounts(), place)
    }

    /// The most bytes that were held in `place` at once since the last call.
    pub fn take_peak(place: Place) -> usize {
        let accounts = accounts();
        PEAKS[place as usize].swap(total_of(&accounts, place), Ordering::Relaxed)
    }

    /// Moves `owner`'s account from `old_bytes` to `new_bytes`, for owners of several allocations of one name.
    pub(super) fn resize(owner: &'static str, place: Place, old_bytes: usize, new_bytes: usize) {
        Self::change(owner, place, |bytes| (bytes + new_bytes).saturating_sub(old_bytes));
    }

    /// The accounts in `place` as one line, for error messages: `kv_cache 12 MiB, optimizer 8 MiB`.
    pub fn summary(place: Place) -> String {
        let held: Vec<String> = Self::report()
            .into_iter()
            .filter(|(at, ..)| *at == place)
            .map(|(_, owner, bytes)| format!("{owner} {} MiB", bytes >> 20))
            .collect();
        if held.is_empty() { "nothing else is held".to_owned() } else { format!("held: {}", held.join(", ")) }
    }

    fn change(owner: &'static str, place: Place, new_bytes: impl FnOnce(usize) -> usize) {
        let mut accounts = accounts();
        let bytes = accounts.entry((place, owner)).or_default();
        *bytes = new_bytes(*bytes);
        if *bytes == 0 {
            accounts.remove(&(place, owner));
        }
        PEAKS[place as usize].fetch_max(total_of(&accounts, place), Ordering::Relaxed);
    }
}

fn total_of(accounts: &Accounts, place: Place) -> usize {
    accounts.iter().filter(|((at, _), _)| *at == place).map(|(_, bytes)| bytes).sum()
}

/// A panic elsewhere cannot leave the map half changed, so a poisoned lock is taken as it is.
fn accounts() -> MutexGuard<'static, Accounts> {
    ACCOUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_open_change_and_close() {
        Ledger::set("ledger_test", Place::Host, 3 << 20);
        Ledger::resize("ledger_test", Place::Host, 1 << 20, 5 << 20);
        assert!(Ledger::report().contains(&(Place::Host, "ledger_test", 7 << 20)));
        assert!(Ledger::total(Place::Host) >= 7 << 20);
        assert!(Ledger::summary(Place::Host).contains("ledger_test 7 MiB"));
        Ledger::set("ledger_test", Place::Host, 0);
        assert!(Ledger::report().iter().all(|(_, owner, _)| *owner != "ledger_test"));
    }
}
