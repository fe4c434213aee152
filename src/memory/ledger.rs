//! Records how many bytes each owner holds, on the device and on the host: for out-of-memory messages, the plan's check and the metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Kinds of memory that are counted separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub enum MemoryKind {
    /// Memory of the device that computes.
    Device,
    /// Host memory for offloaded data.
    Host,
}

/// Bytes that one owner holds in one kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Account {
    /// The kind of memory.
    pub kind: MemoryKind,
    /// The owner's name.
    pub owner: &'static str,
    /// Bytes held.
    pub bytes: usize,
}

/// The process-wide record of bytes by owner. It only counts; it does not own memory.
#[derive(Debug)]
pub struct Ledger;

/// Peak bytes since the last [`Ledger::take_peak`], by kind of memory.
static PEAKS: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
static ACCOUNTS: Mutex<Accounts> = Mutex::new(BTreeMap::new());

/// Bytes by kind of memory and owner.
type Accounts = BTreeMap<(MemoryKind, &'static str), usize>;

impl Ledger {
    /// Records that `owner` now holds `bytes` in `kind`; 0 removes the account.
    pub fn set(owner: &'static str, kind: MemoryKind, bytes: usize) {
        Self::change(owner, kind, |_| bytes);
    }

    /// Every account, by kind of memory and owner.
    pub fn report() -> Vec<Account> {
        accounts().iter().map(|(&(kind, owner), &bytes)| Account { kind, owner, bytes }).collect()
    }

    /// Bytes held in `kind` by all owners together.
    pub fn total(kind: MemoryKind) -> usize {
        total_of(&accounts(), kind)
    }

    /// Returns the peak of bytes held in `kind` since the last call, and resets it.
    pub fn take_peak(kind: MemoryKind) -> usize {
        let accounts = accounts();
        PEAKS[kind as usize].swap(total_of(&accounts, kind), Ordering::Relaxed)
    }

    /// Changes `owner`'s account from `old_bytes` to `new_bytes`, for several allocations under one name.
    pub(super) fn resize(owner: &'static str, kind: MemoryKind, old_bytes: usize, new_bytes: usize) {
        Self::change(owner, kind, |bytes| (bytes + new_bytes).saturating_sub(old_bytes));
    }

    /// The accounts in `kind` in one line, for error messages: `kv_cache 12 MiB, optimizer 8 MiB`.
    pub fn summary(kind: MemoryKind) -> String {
        let held: Vec<String> = Self::report()
            .into_iter()
            .filter(|account| account.kind == kind)
            .map(|Account { owner, bytes, .. }| format!("{owner} {} MiB", bytes >> 20))
            .collect();
        if held.is_empty() { "nothing else is held".to_owned() } else { format!("held: {}", held.join(", ")) }
    }

    fn change(owner: &'static str, kind: MemoryKind, new_bytes: impl FnOnce(usize) -> usize) {
        let mut accounts = accounts();
        let bytes = accounts.entry((kind, owner)).or_default();
        *bytes = new_bytes(*bytes);
        if *bytes == 0 {
            accounts.remove(&(kind, owner));
        }
        PEAKS[kind as usize].fetch_max(total_of(&accounts, kind), Ordering::Relaxed);
    }
}

fn total_of(accounts: &Accounts, kind: MemoryKind) -> usize {
    accounts.iter().filter(|((at, _), _)| *at == kind).map(|(_, bytes)| bytes).sum()
}

/// The map is never left half changed, so a lock poisoned by another thread's panic can be used.
fn accounts() -> MutexGuard<'static, Accounts> {
    ACCOUNTS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ledger_accounts_open_change_and_close() {
        Ledger::set("ledger_test", MemoryKind::Host, 3 << 20);
        Ledger::resize("ledger_test", MemoryKind::Host, 1 << 20, 5 << 20);
        assert!(Ledger::report().contains(&Account { kind: MemoryKind::Host, owner: "ledger_test", bytes: 7 << 20 }));
        assert!(Ledger::total(MemoryKind::Host) >= 7 << 20);
        assert!(Ledger::summary(MemoryKind::Host).contains("ledger_test 7 MiB"));
        Ledger::set("ledger_test", MemoryKind::Host, 0);
        assert!(Ledger::report().iter().all(|account| account.owner != "ledger_test"));
    }
}
