//! What an offer must show before it is published: sealed memory, right sizes, a manifest that holds together.
//! The weights themselves are not read here.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::closer::Sent;
use crate::key::Key;
use crate::manifest::{Digest, MAX_BYTES, MAX_SLABS, Manifest};
use crate::protocol::EntryId;
use crate::slab::DeviceId;
use crate::slab::host::{HostMapping, check_sealed};

/// A checked offer.
#[derive(Debug)]
pub(super) struct Offered {
    pub(super) manifest: Arc<OwnedFd>,
    pub(super) anchor: Option<OwnedFd>,
    pub(super) slabs: Vec<OwnedFd>,
    pub(super) summary: Summary,
}

/// What the daemon keeps of a manifest.
#[derive(Debug)]
pub(super) struct Summary {
    pub(super) root: Digest,
    pub(super) tensors: u64,
    pub(super) memory_bytes: u64,
    /// Digest over where each tensor lies: a manifest fits every set of slabs of its layout.
    pub(super) layout: Digest,
    /// Digest over attributes and small files.
    extras: Digest,
    pub(super) key: Key,
}

impl Offered {
    /// Descriptors that it takes, an anchor's own and its watch counted in any case.
    pub(super) fn descriptors(&self) -> usize {
        self.slabs.len() + 2
    }
}

impl Summary {
    fn of(manifest: Manifest, bytes: &[u8]) -> Self {
        let mut layout = blake3::Hasher::new();
        for slab in &manifest.slabs {
            layout.update(&slab.to_le_bytes());
        }
        for tensor in &manifest.tensors {
            layout.update(&tensor.slab.to_le_bytes());
            layout.update(&tensor.offset.to_le_bytes());
        }
        let mut extras = blake3::Hasher::new();
        let mut text = |part: &[u8]| {
            extras.update(&(part.len() as u64).to_le_bytes());
            extras.update(part);
        };
        for (name, value) in &manifest.attributes {
            text(name.as_bytes());
            text(value.as_bytes());
        }
        for file in &manifest.files {
            text(file.name.as_bytes());
            // `check` has seen to it that the file lies inside.
            let end = file.offset + file.bytes;
            text(
                bytes
                    .get(file.offset as usize..end as usize)
                    .unwrap_or_default(),
            );
        }
        Self {
            root: manifest.root,
            tensors: (manifest.tensors.len() + manifest.aliases.len()) as u64,
            memory_bytes: manifest.memory_bytes(),
            layout: layout.finalize().into(),
            extras: extras.finalize().into(),
            key: manifest.key,
        }
    }

    /// Whether an engine would find the same in both. Receipts do not count: a file that was
    /// touched, or copied, holds the same weights.
    pub(super) fn same_content(&self, other: &Self) -> bool {
        self.root == other.root
            && self.extras == other.extras
            && self.key.differences(&other.key).is_empty()
    }

    #[cfg(test)]
    pub(super) fn for_test(content: u8, layout: u8) -> Self {
        Self {
            root: Digest([content; 32]),
            tensors: 1,
            memory_bytes: 4,
            layout: Digest([layout; 32]),
            extras: Digest::default(),
            key: Key {
                model: "m".into(),
                shard: Default::default(),
                selection: "all".into(),
                stacked: false,
                dtype: "stored".into(),
                recipe: "none".into(),
                format: 1,
                sources: Vec::new(),
            },
        }
    }
}

/// Checks an offer for `entry`. Decodes the manifest, which may take a while: not for a thread
/// that serves others.
///
/// # Errors
/// The reason, for the worker.
pub(super) fn check(
    entry: &EntryId,
    anchor: bool,
    slabs: u32,
    fds: Sent,
) -> Result<Offered, String> {
    let slabs = slabs as usize;
    if slabs > MAX_SLABS {
        return Err(format!("{slabs} slabs, the limit is {MAX_SLABS}"));
    }
    let wanted = 1 + usize::from(anchor) + slabs;
    if fds.len() != wanted {
        return Err(format!(
            "{} descriptors came, {wanted} were announced: manifest, {}{slabs} slabs",
            fds.len(),
            if anchor { "anchor, " } else { "" }
        ));
    }
    if anchor && entry.device == DeviceId::Host {
        return Err(
            "an anchor with slabs in host memory, which has no device to keep alive".into(),
        );
    }
    let (manifest_fd, slab_fds) = (&fds[0], &fds[wanted - slabs..]);
    let bytes = check_sealed(manifest_fd.as_fd(), "the manifest").map_err(|e| e.to_string())?;
    if bytes > MAX_BYTES {
        return Err(format!(
            "a manifest of {bytes} bytes, the limit is {MAX_BYTES}"
        ));
    }
    let mapping = HostMapping::map(manifest_fd.as_fd(), Some(bytes), "the manifest")
        .map_err(|e| e.to_string())?;
    let manifest = Manifest::decode(mapping.as_slice()).map_err(|e| e.to_string())?;
    if manifest.key.model != entry.name {
        return Err(format!(
            "the manifest is of `{}`, announced was `{}`",
            manifest.key.model, entry.name
        ));
    }
    if manifest.key.shard != entry.shard {
        return Err(format!(
            "the manifest is of part {}, announced was {}",
            manifest.key.shard, entry.shard
        ));
    }
    if manifest.slabs.len() != slabs {
        return Err(format!(
            "{slabs} slabs came, the manifest lists {}",
            manifest.slabs.len()
        ));
    }
    if entry.device == DeviceId::Host {
        for (i, (fd, wanted)) in slab_fds.iter().zip(&manifest.slabs).enumerate() {
            let found =
                check_sealed(fd.as_fd(), &format!("slab {i}")).map_err(|e| e.to_string())?;
            if found != *wanted {
                return Err(format!(
                    "slab {i} has {found} bytes, the manifest says {wanted}"
                ));
            }
        }
    }
    let summary = Summary::of(manifest, mapping.as_slice());
    drop(mapping);
    let mut fds = fds.into_vec();
    let slab_fds = fds.split_off(wanted - slabs);
    let anchor = if anchor { fds.pop() } else { None };
    let manifest_fd = fds.pop().ok_or("no manifest came")?;
    Ok(Offered {
        manifest: Arc::new(manifest_fd),
        anchor,
        slabs: slab_fds,
        summary,
    })
}
