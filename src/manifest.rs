//! The manifest: the table that says which tensor lies where inside an epoch's slabs.
//! It is encoded once, into a sealed memfd, and every party that receives one parses it here.

use std::collections::HashSet;
use std::fmt;

use std::marker::PhantomData;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::key::Key;

mod element;

pub use element::ElementType;

/// Version of the manifest's layout. Readers accept this one only.
pub const FORMAT_VERSION: u32 = 2;
/// Tensors sit at multiples of this many bytes inside a slab.
pub const ALIGNMENT: u64 = 256;
/// Most tensors and aliases one manifest may list, together.
pub const MAX_TENSORS: usize = 1 << 20;
/// Most slabs one entry may have: one packet carries them all, with the manifest and the anchor.
pub const MAX_SLABS: usize = 250;
/// Longest tensor name, in bytes.
pub const MAX_NAME: usize = 1024;
/// Most dimensions of a tensor.
pub const MAX_RANK: usize = 16;
/// Most attributes of one manifest.
pub const MAX_ATTRIBUTES: usize = 4096;
/// Most small files of one manifest.
pub const MAX_FILES: usize = 1024;
/// Largest manifest, in bytes, small files included.
pub const MAX_BYTES: u64 = 1 << 30;
/// Largest table, in bytes: a manifest without its small files.
pub const MAX_TABLE_BYTES: usize = 256 << 20;

const MAGIC: [u8; 8] = *b"CNDLIPC\0";
const HEADER: usize = 64;

/// A BLAKE3 digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Self(*hash.as_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for Digest {
    type Err = blake3::HexError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        blake3::Hash::from_hex(text).map(Self::from)
    }
}

/// One tensor's place inside the slabs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorEntry {
    /// The name that the checkpoint gives it.
    pub name: String,
    /// How its elements are stored.
    pub element: ElementType,
    /// Dimensions, outermost first; of a slice, the slice's own.
    #[serde(deserialize_with = "capped::<_, _, MAX_RANK>")]
    pub shape: Vec<u64>,
    /// The dimension along which the tensor was cut, so that this is the slice of the key's tensor-parallel rank;
    /// `None`: all of the tensor.
    pub cut: Option<u32>,
    /// Index of its slab.
    pub slab: u32,
    /// Bytes from the slab's start; a multiple of [`ALIGNMENT`], but for a [`Stack`]'s members behind the first.
    pub offset: u64,
    /// Length in bytes, as [`ElementType::bytes`] says.
    pub bytes: u64,
    /// Digest of the bytes in the checkpoint; of a slice, of the slice's own bytes, run after run.
    pub source: Digest,
    /// Digest of the bytes in the slab.
    pub stored: Digest,
}

/// A second name for a tensor: both names share one storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alias {
    /// The name.
    pub name: String,
    /// Index into [`Manifest::tensors`].
    pub tensor: u32,
}

/// A tensor whose slices along its first dimension are tensors of their own, with names of their own: the experts of a
/// layer. They share one memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stack {
    /// The whole: index into [`Manifest::tensors`]. Its digests are those of [`stack_digest`] over its members'.
    pub tensor: u32,
    /// The slices, in order: indices into [`Manifest::tensors`].
    #[serde(deserialize_with = "capped::<_, _, MAX_TENSORS>")]
    pub members: Vec<u32>,
}

/// The digest of a stack: over its members' digests, in order.
pub fn stack_digest(members: impl IntoIterator<Item = Digest>) -> Digest {
    let mut hasher =
        blake3::Hasher::new_derive_key("candle-ipc-cache 1 digest over stacked tensors");
    for member in members {
        hasher.update(&member.0);
    }
    hasher.finalize().into()
}

/// A small file that travels with the weights, inside the manifest's own memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Path relative to the checkpoint's folder, with forward slashes.
    pub name: String,
    /// Bytes from the manifest's start.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The decoded table. Every value that [`Manifest::decode`] returns has passed [`Manifest::check`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// What must be equal for these weights to be the right ones.
    pub key: Key,
    /// Digest over every tensor's name, type, shape and digests: see [`Manifest::digest`].
    pub root: Digest,
    /// Length of each slab, in bytes.
    #[serde(deserialize_with = "capped::<_, _, MAX_SLABS>")]
    pub slabs: Vec<u64>,
    /// Tensors, sorted by name, each name once.
    #[serde(deserialize_with = "capped::<_, _, MAX_TENSORS>")]
    pub tensors: Vec<TensorEntry>,
    /// Second names, sorted by name, none of them a tensor's own.
    #[serde(deserialize_with = "capped::<_, _, MAX_TENSORS>")]
    pub aliases: Vec<Alias>,
    /// Tensors that are made up of others, sorted by their index.
    #[serde(deserialize_with = "capped::<_, _, MAX_TENSORS>")]
    pub stacks: Vec<Stack>,
    /// Strings that travel with the weights, sorted by name.
    #[serde(deserialize_with = "capped::<_, _, MAX_ATTRIBUTES>")]
    pub attributes: Vec<(String, String)>,
    /// Small files, sorted by name.
    #[serde(deserialize_with = "capped::<_, _, MAX_FILES>")]
    pub files: Vec<FileEntry>,
}

/// Why bytes are not a manifest, or why a manifest is not to be believed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// The bytes do not start as a manifest does.
    #[error("not a manifest: {0}")]
    NotAManifest(&'static str),
    /// Written by another version of this software.
    #[error(
        "manifest format version {found}, this build reads version {wanted}: run the same release of \
         candle-cache and of the engine, and load the model again"
    )]
    Version {
        /// The version found.
        found: u32,
        /// The version this build reads.
        wanted: u32,
    },
    /// The table's bytes do not match their digest.
    #[error("the manifest's table is damaged: digest {found}, its header says {wanted}")]
    Damaged {
        /// Digest of the bytes that are there.
        found: Digest,
        /// Digest that the header gives.
        wanted: Digest,
    },
    /// The table does not decode.
    #[error("the manifest's table does not decode: {0}")]
    Codec(String),
    /// A number exceeds its limit.
    #[error("the manifest has {found} {what}, the limit is {limit}")]
    Limit {
        /// What is counted.
        what: &'static str,
        /// The count.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A statement about one tensor, alias or file does not hold.
    #[error("manifest entry `{name}`: {what}")]
    Entry {
        /// The entry's name.
        name: String,
        /// What does not hold.
        what: String,
    },
    /// The root digest is not the digest of the table.
    #[error("the manifest's root digest is {found}, its tensors make {wanted}")]
    Root {
        /// The digest in the manifest.
        found: Digest,
        /// The digest computed.
        wanted: Digest,
    },
}

fn entry_error(name: &str, what: impl Into<String>) -> ManifestError {
    ManifestError::Entry {
        name: name.to_string(),
        what: what.into(),
    }
}

fn within(what: &'static str, found: usize, limit: usize) -> Result<(), ManifestError> {
    if found > limit {
        return Err(ManifestError::Limit {
            what,
            found: found as u64,
            limit: limit as u64,
        });
    }
    Ok(())
}

impl Manifest {
    /// Encodes the manifest with its small files (`name`, bytes), ready to be written to a memfd.
    ///
    /// Fills in [`Manifest::files`], sorts every list, and computes the root.
    ///
    /// # Errors
    /// When a limit is exceeded or the manifest does not hold together ([`Manifest::check`]).
    pub fn encode(&mut self, mut files: Vec<(String, Vec<u8>)>) -> Result<Vec<u8>, ManifestError> {
        files.sort_by(|a, b| a.0.cmp(&b.0));
        self.attributes.sort();
        self.root = self.digest();
        // Offsets have a fixed width in the table, so that its length does not depend on them.
        self.files = files
            .iter()
            .map(|(name, bytes)| FileEntry {
                name: name.clone(),
                offset: 0,
                bytes: bytes.len() as u64,
            })
            .collect();
        let table = bincode::serde::encode_to_vec(&*self, codec())
            .map_err(|e| ManifestError::Codec(e.to_string()))?;
        within("bytes of table", table.len(), MAX_TABLE_BYTES)?;
        let mut end = (HEADER + table.len()) as u64;
        for file in &mut self.files {
            file.offset = end.next_multiple_of(64);
            end = file.offset + file.bytes;
        }
        if end > MAX_BYTES {
            return Err(ManifestError::Limit {
                what: "bytes",
                found: end,
                limit: MAX_BYTES,
            });
        }
        let table = bincode::serde::encode_to_vec(&*self, codec())
            .map_err(|e| ManifestError::Codec(e.to_string()))?;
        let mut out = Vec::with_capacity(end as usize);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        out.extend_from_slice(&(table.len() as u64).to_le_bytes());
        out.extend_from_slice(&Digest::of(&table).0);
        out.resize(HEADER, 0);
        out.extend_from_slice(&table);
        for (entry, (_, bytes)) in self.files.iter().zip(&files) {
            out.resize(entry.offset as usize, 0);
            out.extend_from_slice(bytes);
        }
        self.check(out.len() as u64)?;
        Ok(out)
    }

    /// Decodes and checks a manifest.
    ///
    /// # Errors
    /// When the bytes are not a manifest of this version, are damaged, or claim what does not hold.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        if bytes.len() < HEADER {
            return Err(ManifestError::NotAManifest("shorter than its header"));
        }
        let (header, rest) = bytes.split_at(HEADER);
        if header[..8] != MAGIC {
            return Err(ManifestError::NotAManifest("other magic bytes"));
        }
        let found = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        if found != FORMAT_VERSION {
            return Err(ManifestError::Version {
                found,
                wanted: FORMAT_VERSION,
            });
        }
        let mut length = [0; 8];
        length.copy_from_slice(&header[16..24]);
        let length = u64::from_le_bytes(length);
        if length > MAX_TABLE_BYTES as u64 {
            return Err(ManifestError::Limit {
                what: "bytes of table",
                found: length,
                limit: MAX_TABLE_BYTES as u64,
            });
        }
        let Some(table) = rest.get(..length as usize) else {
            return Err(ManifestError::NotAManifest("shorter than its table"));
        };
        let mut wanted = Digest::default();
        wanted.0.copy_from_slice(&header[24..56]);
        let found = Digest::of(table);
        if found != wanted {
            return Err(ManifestError::Damaged { found, wanted });
        }
        let (manifest, read): (Self, usize) = bincode::serde::decode_from_slice(table, codec())
            .map_err(|e| ManifestError::Codec(e.to_string()))?;
        if read != table.len() {
            return Err(ManifestError::NotAManifest(
                "bytes left over after the table",
            ));
        }
        manifest.check(bytes.len() as u64)?;
        let wanted = manifest.digest();
        if manifest.root != wanted {
            return Err(ManifestError::Root {
                found: manifest.root,
                wanted,
            });
        }
        Ok(manifest)
    }

    /// The digest over every tensor: name, type, shape, both digests, and of a slice which one it is; and over the
    /// aliases.
    /// Where a tensor lies does not count, so two layouts of the same weights agree.
    pub fn digest(&self) -> Digest {
        // Small pieces would keep BLAKE3 from using wide registers.
        const PIECE: usize = 64 << 10;
        let mut hasher = blake3::Hasher::new_derive_key("candle-ipc-cache 1 root over tensors");
        let mut lines = Vec::with_capacity(PIECE + 2 * MAX_NAME);
        let mut flush = |lines: &mut Vec<u8>, at_least: usize| {
            if lines.len() >= at_least {
                hasher.update(lines);
                lines.clear();
            }
        };
        for t in &self.tensors {
            lines.extend_from_slice(&(t.name.len() as u64).to_le_bytes());
            lines.extend_from_slice(t.name.as_bytes());
            lines.extend_from_slice(t.element.as_str().as_bytes());
            lines.push(0);
            lines.extend_from_slice(&(t.shape.len() as u64).to_le_bytes());
            for d in &t.shape {
                lines.extend_from_slice(&d.to_le_bytes());
            }
            lines.extend_from_slice(&t.source.0);
            lines.extend_from_slice(&t.stored.0);
            if let Some(dim) = t.cut {
                // No name is that long, so no line begins so.
                lines.extend_from_slice(&u64::MAX.to_le_bytes());
                let tp = self.key.shard.tp;
                for number in [dim, tp.rank.into(), tp.size.into()] {
                    lines.extend_from_slice(&number.to_le_bytes());
                }
            }
            flush(&mut lines, PIECE);
        }
        for a in &self.aliases {
            lines.extend_from_slice(&(a.name.len() as u64).to_le_bytes());
            lines.extend_from_slice(a.name.as_bytes());
            lines.extend_from_slice(&a.tensor.to_le_bytes());
            flush(&mut lines, PIECE);
        }
        for stack in &self.stacks {
            // As above.
            lines.extend_from_slice(&(u64::MAX - 1).to_le_bytes());
            lines.extend_from_slice(&stack.tensor.to_le_bytes());
            lines.extend_from_slice(&(stack.members.len() as u64).to_le_bytes());
            for member in &stack.members {
                lines.extend_from_slice(&member.to_le_bytes());
                flush(&mut lines, PIECE);
            }
        }
        flush(&mut lines, 0);
        hasher.finalize().into()
    }

    /// Checks everything that a reader relies on. `total` is the length of the manifest's memory.
    ///
    /// # Errors
    /// Names the first entry that does not hold: unsorted or doubled names, a length that its type
    /// and shape do not give, a place outside its slab, an overlap, a dangling alias or file.
    pub fn check(&self, total: u64) -> Result<(), ManifestError> {
        within(
            "tensors",
            self.tensors.len().saturating_add(self.aliases.len()),
            MAX_TENSORS,
        )?;
        within("slabs", self.slabs.len(), MAX_SLABS)?;
        if self.tensors.is_empty() {
            return Err(ManifestError::NotAManifest("it lists no tensors"));
        }
        for (name, part) in self.key.shard.parts() {
            if !part.is_possible() {
                return Err(entry_error(name, format!("there is no rank {part}")));
            }
        }
        self.slabs
            .iter()
            .try_fold(0u64, |n, s| n.checked_add(*s))
            .ok_or(ManifestError::NotAManifest("its slabs' lengths overflow"))?;
        sorted(self.tensors.iter().map(|t| t.name.as_str()))?;
        sorted(self.aliases.iter().map(|a| a.name.as_str()))?;
        sorted(self.files.iter().map(|f| f.name.as_str()))?;
        let behind = self.check_stacks()?;
        for (i, t) in self.tensors.iter().enumerate() {
            self.check_tensor(t, behind.contains(&(i as u32)))?;
        }
        self.check_overlaps()?;
        for a in &self.aliases {
            if a.tensor as usize >= self.tensors.len() {
                return Err(entry_error(
                    &a.name,
                    "an alias of a tensor that is not in the table",
                ));
            }
            if self
                .tensors
                .binary_search_by(|t| t.name.as_str().cmp(&a.name))
                .is_ok()
            {
                return Err(entry_error(&a.name, "both a tensor and an alias"));
            }
        }
        within("attributes", self.attributes.len(), MAX_ATTRIBUTES)?;
        within("files", self.files.len(), MAX_FILES)?;
        for f in &self.files {
            within("bytes in a file's name", f.name.len(), MAX_NAME)?;
            let parts = std::path::Path::new(&f.name).components();
            let plain = parts.fold(!f.name.is_empty(), |plain, part| {
                plain && matches!(part, std::path::Component::Normal(_))
            });
            if !plain || f.name.contains(char::is_control) {
                return Err(entry_error(
                    &f.name.escape_debug().to_string(),
                    "no relative path of a file",
                ));
            }
            if f.offset < HEADER as u64
                || f.offset.checked_add(f.bytes).is_none_or(|end| end > total)
            {
                return Err(entry_error(
                    &f.name,
                    "a file that lies outside the manifest",
                ));
            }
        }
        Ok(())
    }

    /// Checks that each stack is its members, one behind the other, and returns those that lie behind another.
    fn check_stacks(&self) -> Result<HashSet<u32>, ManifestError> {
        let mut seen = HashSet::new();
        let mut behind = HashSet::new();
        let mut last = None;
        let of = |index: u32| {
            let tensor = self.tensors.get(index as usize);
            tensor.ok_or_else(|| entry_error("a stack", "of a tensor that is not in the table"))
        };
        for Stack { tensor, members } in &self.stacks {
            let stack = of(*tensor)?;
            let wrong = |what: &str| entry_error(&stack.name, format!("a stack {what}"));
            if last.is_some_and(|last| last >= *tensor) {
                return Err(wrong("that is out of order, or stands twice"));
            }
            last = Some(*tensor);
            if members.is_empty() {
                return Err(wrong("of nothing"));
            }
            let mut offset = stack.offset;
            for (i, index) in members.iter().enumerate() {
                let member = of(*index)?;
                if self.is_stack(*index as usize) || !seen.insert(*index) {
                    return Err(wrong("of a stack, or of a tensor in two of them"));
                }
                let same = member.element == stack.element
                    && stack.shape.get(1..) == Some(member.shape.as_slice())
                    && stack.cut == member.cut.map(|dim| dim + 1)
                    && member.bytes > 0;
                if !same || (member.slab, member.offset) != (stack.slab, offset) {
                    return Err(wrong(&format!(
                        "of `{}`, which is no slice of it, or does not lie there",
                        member.name
                    )));
                }
                if i > 0 {
                    behind.insert(*index);
                }
                offset = offset
                    .checked_add(member.bytes)
                    .ok_or_else(|| wrong("that ends nowhere"))?;
            }
            let digests = |of: fn(&TensorEntry) -> Digest| {
                stack_digest(members.iter().map(|i| of(&self.tensors[*i as usize])))
            };
            if stack.shape.first() != Some(&(members.len() as u64))
                || stack.source != digests(|t| t.source)
                || stack.stored != digests(|t| t.stored)
            {
                return Err(wrong("of other tensors than it says"));
            }
        }
        Ok(behind)
    }

    /// Whether the tensor at `index` is made up of others.
    pub fn is_stack(&self, index: usize) -> bool {
        let stacks = &self.stacks;
        stacks
            .binary_search_by(|stack| (stack.tensor as usize).cmp(&index))
            .is_ok()
    }

    fn check_tensor(&self, t: &TensorEntry, behind: bool) -> Result<(), ManifestError> {
        within("bytes in a tensor's name", t.name.len(), MAX_NAME)?;
        within("dimensions of a tensor", t.shape.len(), MAX_RANK)?;
        if let Some(dim) = t.cut
            && (dim as usize >= t.shape.len() || self.key.shard.tp.is_whole())
        {
            return Err(entry_error(
                &t.name,
                format!(
                    "cut along dimension {dim} of {:?} for rank {}",
                    t.shape, self.key.shard.tp
                ),
            ));
        }
        if t.element.bytes(&t.shape) != Some(t.bytes) {
            return Err(entry_error(
                &t.name,
                format!(
                    "{} of shape {:?} is not {} bytes",
                    t.element, t.shape, t.bytes
                ),
            ));
        }
        if t.bytes == 0 {
            if (t.slab, t.offset) != (0, 0) {
                return Err(entry_error(&t.name, "an empty tensor that lies somewhere"));
            }
            return Ok(());
        }
        let Some(slab) = self.slabs.get(t.slab as usize) else {
            return Err(entry_error(
                &t.name,
                format!("lies in slab {} of {}", t.slab, self.slabs.len()),
            ));
        };
        // One that lies behind another in a stack is as far from an aligned place as its type wants.
        if !behind && !t.offset.is_multiple_of(ALIGNMENT) {
            return Err(entry_error(
                &t.name,
                format!("offset {} is not a multiple of {ALIGNMENT}", t.offset),
            ));
        }
        if t.offset.checked_add(t.bytes).is_none_or(|end| end > *slab) {
            return Err(entry_error(
                &t.name,
                format!(
                    "{} bytes at {} lie outside their slab of {slab} bytes",
                    t.bytes, t.offset
                ),
            ));
        }
        Ok(())
    }

    fn check_overlaps(&self) -> Result<(), ManifestError> {
        let mut order: Vec<u32> = (0..self.tensors.len() as u32)
            .filter(|i| self.tensors[*i as usize].bytes > 0 && !self.is_stack(*i as usize))
            .collect();
        order.sort_unstable_by_key(|i| {
            let t = &self.tensors[*i as usize];
            (t.slab, t.offset)
        });
        for pair in order.windows(2) {
            let (a, b) = (
                &self.tensors[pair[0] as usize],
                &self.tensors[pair[1] as usize],
            );
            if a.slab == b.slab && a.offset + a.bytes > b.offset {
                return Err(entry_error(&b.name, format!("overlaps `{}`", a.name)));
            }
        }
        Ok(())
    }

    /// Index of the tensor that `name`, a tensor's own name or an alias, stands for.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.position(name).map(|at| self.tensor_at(at))
    }

    /// Where `name` stands among [`Manifest::names`].
    pub fn position(&self, name: &str) -> Option<usize> {
        let tensors = &self.tensors;
        match tensors.binary_search_by(|t| t.name.as_str().cmp(name)) {
            Ok(i) => Some(i),
            Err(_) => {
                let aliases = &self.aliases;
                let found = aliases.binary_search_by(|a| a.name.as_str().cmp(name));
                found.ok().map(|i| tensors.len() + i)
            }
        }
    }

    /// Index of the tensor that the name at this position stands for.
    ///
    /// # Panics
    /// When there is no such position.
    pub fn tensor_at(&self, position: usize) -> usize {
        match position.checked_sub(self.tensors.len()) {
            None => position,
            Some(alias) => self.aliases[alias].tensor as usize,
        }
    }

    /// The name at this position.
    ///
    /// # Panics
    /// When there is no such position.
    pub fn name_at(&self, position: usize) -> &str {
        match position.checked_sub(self.tensors.len()) {
            None => &self.tensors[position].name,
            Some(alias) => &self.aliases[alias].name,
        }
    }

    /// Every name: the tensors' own, then the aliases.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors
            .iter()
            .map(|t| t.name.as_str())
            .chain(self.aliases.iter().map(|a| a.name.as_str()))
    }

    /// Bytes of all slabs: what the entry takes from its device, exactly.
    pub fn memory_bytes(&self) -> u64 {
        self.slabs.iter().sum()
    }
}

fn sorted<'a>(names: impl Iterator<Item = &'a str>) -> Result<(), ManifestError> {
    let mut last: Option<&str> = None;
    for name in names {
        if last.is_some_and(|l| l >= name) {
            return Err(entry_error(
                name,
                "names are not sorted, or one stands twice",
            ));
        }
        last = Some(name);
    }
    Ok(())
}

/// A list that stops being read once it is longer than it may be: a few bytes can claim a great many elements.
pub(crate) fn capped<'de, D, T, const MAX: usize>(from: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Capped<T, const MAX: usize>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for Capped<T, MAX> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "at most {MAX} elements")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<T>, A::Error> {
            let mut out = Vec::with_capacity(list.size_hint().unwrap_or_default().min(1 << 12));
            while let Some(element) = list.next_element()? {
                if out.len() == MAX {
                    return Err(serde::de::Error::custom(format!(
                        "more than {MAX} elements"
                    )));
                }
                out.push(element);
            }
            Ok(out)
        }
    }
    from.deserialize_seq(Capped::<T, MAX>(PhantomData))
}

fn codec() -> impl bincode::config::Config {
    // Fixed-width integers: a file's offset does not change the table's length.
    bincode::config::standard()
        .with_fixed_int_encoding()
        .with_limit::<MAX_TABLE_BYTES>()
}

#[cfg(test)]
impl Manifest {
    /// A table of tensors that lie nowhere, for whatever needs their names, types and shapes alone.
    pub(crate) fn of_shapes(tensors: &[(&str, ElementType, &[u64])]) -> Self {
        let entry = |(name, element, shape): &(&str, ElementType, &[u64])| TensorEntry {
            name: (*name).into(),
            element: *element,
            shape: shape.to_vec(),
            cut: None,
            slab: 0,
            offset: 0,
            bytes: element.bytes(shape).expect("whole blocks"),
            source: Digest::default(),
            stored: Digest::default(),
        };
        let mut tensors: Vec<_> = tensors.iter().map(entry).collect();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Self {
            key: Key {
                model: "m".into(),
                shard: Default::default(),
                selection: crate::key::ALL.into(),
                stacked: false,
                dtype: "stored".into(),
                recipe: "none".into(),
                format: FORMAT_VERSION,
                sources: Vec::new(),
            },
            root: Digest::default(),
            slabs: Vec::new(),
            tensors,
            aliases: Vec::new(),
            stacks: Vec::new(),
            attributes: Vec::new(),
            files: Vec::new(),
        }
    }
}
