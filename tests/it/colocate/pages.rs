//! Measures the physical memory behind address ranges as the kernel reports it, not as the program accounts for it.

/// A range of virtual addresses of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pages {
    start: usize,
    end: usize,
}

impl Pages {
    /// Mapped arenas and pools: accessible ranges of `bytes` bytes, rounded up to pages, each after an inaccessible range.
    pub fn mapped(bytes: usize) -> Vec<Self> {
        let entries = smaps();
        let pairs = entries.windows(2).filter(|pair| {
            let (guard, range) = (&pair[0], &pair[1]);
            let size = range.pages.end - range.pages.start;
            guard.access.starts_with("---")
                && guard.pages.end == range.pages.start
                && size == bytes.next_multiple_of(4096)
        });
        pairs.map(|pair| pair[1].pages).collect()
    }

    /// Bytes of physical memory behind the range.
    pub fn resident_bytes(self) -> usize {
        let inside = smaps().into_iter().filter(|entry| entry.pages.start < self.end && entry.pages.end > self.start);
        inside.map(|entry| entry.resident_bytes).sum()
    }
}

/// Bytes of physical memory of this process.
pub fn resident_bytes() -> usize {
    smaps().into_iter().map(|entry| entry.resident_bytes).sum()
}

struct Entry {
    pages: Pages,
    access: String,
    resident_bytes: usize,
}

fn smaps() -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    for line in std::fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap(), words.next().unwrap_or_default());
        if first == "Rss:" {
            entries.last_mut().unwrap().resident_bytes = second.parse::<usize>().unwrap() << 10;
        } else if let Some((start, end)) = first.split_once('-') {
            let address = |text| usize::from_str_radix(text, 16).unwrap();
            let pages = Pages { start: address(start), end: address(end) };
            entries.push(Entry { pages, access: second.to_owned(), resident_bytes: 0 });
        }
    }
    entries
}
