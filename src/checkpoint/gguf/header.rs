//! One GGUF header, versions 1 to 3: read once, front to back, under caps, with checked arithmetic.
//! The format: magic, version, counts, key-value pairs, tensor infos, padding, tensor data.

use std::collections::HashSet;
use std::path::Path;

use super::super::error::{UnknownType, shown};
use super::super::source::{check_is_content, read_at, system};
use super::super::{CheckpointError, SourceFile, SourceTensor};
use super::types;
use crate::manifest::{MAX_NAME, MAX_TENSORS};

/// Largest header, in bytes. A vocabulary of a million tokens with merges takes about 40 MB.
const MAX_HEADER: u64 = 128 << 20;
/// Most key-value pairs. Real files have fewer than a hundred.
const MAX_KEYS: u64 = 1 << 16;
/// Longest key, in bytes, as the format says.
const MAX_KEY: u64 = 65_535;
/// Deepest nesting of arrays. Real files do not nest them.
const MAX_DEPTH: u32 = 8;
/// Most dimensions of a tensor, as GGML and candle have it.
const MAX_DIMS: u32 = 4;
/// Longest string that is kept from the metadata, in bytes.
const MAX_KEPT: usize = 64 << 10;
const DEFAULT_ALIGNMENT: u64 = 32;
/// Bytes that are fetched at once.
const STEP: u64 = 1 << 20;

/// What a header says.
#[derive(Default)]
pub(super) struct Header {
    /// Tensors in the order of the file, without those in `unknown`.
    pub(super) tensors: Vec<SourceTensor>,
    /// Tensors of types that candle lacks.
    pub(super) unknown: Vec<UnknownType>,
    /// The strings among the `general.*` keys.
    pub(super) general: Vec<(String, String)>,
    /// `split.no`, from 0.
    pub(super) split_no: Option<i128>,
    /// `split.count`.
    pub(super) split_count: Option<i128>,
    /// `split.tensors.count`.
    pub(super) split_tensors: Option<i128>,
    /// Whether there is a tokenizer inside.
    pub(super) vocabulary: bool,
    /// Everything before the tensor data, verbatim.
    pub(super) bytes: Vec<u8>,
}

/// Reads and checks the header of `source`, which becomes file number `file` of its checkpoint.
pub(super) fn read(
    source: &SourceFile,
    path: &Path,
    file: usize,
) -> Result<Header, CheckpointError> {
    check_is_content(source, path)?;
    let mut reader = Reader {
        source,
        path,
        bytes: Vec::new(),
        at: 0,
        narrow: false,
        place: "the version".into(),
    };
    let mut header = Header::default();
    let (tensors, keys) = reader.start()?;
    let alignment = reader.keys(keys, &mut header)?;
    reader.tensors(tensors, file, &mut header)?;
    let data = reader.data_start(alignment, &header)?;
    place(path, &mut header, data, alignment, source.receipt.bytes)?;
    header.bytes = reader.bytes;
    Ok(header)
}

/// Turns offsets into places in the file, and checks that they are aligned, apart and inside.
fn place(
    path: &Path,
    header: &mut Header,
    data: u64,
    alignment: u64,
    total: u64,
) -> Result<(), CheckpointError> {
    for t in &mut header.tensors {
        if !t.offset.is_multiple_of(alignment) {
            return Err(CheckpointError::tensor(
                path,
                &t.name,
                format!(
                    "its offset {} is not a multiple of the alignment {alignment}",
                    t.offset
                ),
            ));
        }
        t.offset = data
            .checked_add(t.offset)
            .filter(|start| start.checked_add(t.bytes).is_some())
            .ok_or_else(|| {
                CheckpointError::tensor(path, &t.name, format!("its offset {} overflows", t.offset))
            })?;
    }
    let mut order: Vec<&SourceTensor> = header.tensors.iter().filter(|t| t.bytes > 0).collect();
    order.sort_by_key(|t| (t.offset, t.bytes));
    for pair in order.windows(2) {
        let (a, b) = (pair[0], pair[1]);
        if (a.offset, a.bytes) == (b.offset, b.bytes) {
            return Err(CheckpointError::SharedRange {
                path: path.to_path_buf(),
                first: shown(&a.name),
                second: shown(&b.name),
                start: a.offset - data,
                end: a.offset - data + a.bytes,
            });
        }
        if a.offset + a.bytes > b.offset {
            return Err(CheckpointError::tensor(
                path,
                &b.name,
                format!(
                    "it starts at byte {} of the data, inside `{}`, which ends at {}",
                    b.offset - data,
                    shown(&a.name),
                    a.offset - data + a.bytes
                ),
            ));
        }
    }
    let cut = order.iter().filter(|t| t.offset + t.bytes > total).count();
    if let (Some(first), Some(last)) = (
        order.iter().find(|t| t.offset + t.bytes > total),
        order.last(),
    ) {
        let others = match cut {
            1 => String::new(),
            n => format!(" (and {} after it)", n - 1),
        };
        return Err(CheckpointError::Truncated {
            path: path.to_path_buf(),
            what: format!("tensor `{}`{others}", shown(&first.name)),
            found: total,
            wanted: last.offset + last.bytes,
        });
    }
    Ok(())
}

/// Reads front to back and keeps what it read, because the verbatim header travels with the weights.
struct Reader<'a> {
    source: &'a SourceFile,
    path: &'a Path,
    bytes: Vec<u8>,
    at: usize,
    /// Version 1: lengths and dimensions of 32 bits.
    narrow: bool,
    /// What is being read, for messages.
    place: String,
}

impl Reader<'_> {
    fn left(&self) -> u64 {
        self.source.receipt.bytes.saturating_sub(self.at as u64)
    }

    fn broken(&self, what: impl std::fmt::Display) -> CheckpointError {
        CheckpointError::header(self.path, format!("{}: {what}", self.place))
    }

    fn take(&mut self, n: u64) -> Result<&[u8], CheckpointError> {
        let total = self.source.receipt.bytes;
        let truncated = |place: &str, found, wanted| CheckpointError::Truncated {
            path: self.path.to_path_buf(),
            what: format!("{place} in its header"),
            found,
            wanted,
        };
        let end = (self.at as u64).checked_add(n).filter(|e| *e <= total);
        let Some(end) = end else {
            return Err(truncated(
                &self.place,
                total,
                (self.at as u64).saturating_add(n),
            ));
        };
        if end > MAX_HEADER {
            return Err(CheckpointError::limit(
                self.path,
                "bytes of header or more",
                end,
                MAX_HEADER,
            ));
        }
        let have = self.bytes.len() as u64;
        if end > have {
            let fetch = (end - have).max(STEP).min(total - have);
            self.bytes.resize((have + fetch) as usize, 0);
            let got = read_at(&self.source.file, &mut self.bytes[have as usize..], have)
                .map_err(|e| system(self.path, "reading its header", e))?;
            if (got as u64) < fetch {
                return Err(truncated(&self.place, have + got as u64, have + fetch));
            }
        }
        let from = std::mem::replace(&mut self.at, end as usize);
        Ok(&self.bytes[from..self.at])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CheckpointError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N as u64)?);
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32, CheckpointError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, CheckpointError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A length or a dimension: 32 bits in version 1, else 64.
    fn length(&mut self) -> Result<u64, CheckpointError> {
        if self.narrow {
            Ok(self.u32()?.into())
        } else {
            self.u64()
        }
    }

    fn string(&mut self, limit: u64) -> Result<&[u8], CheckpointError> {
        let length = self.length()?;
        if length > self.left() {
            return Err(self.broken(format!(
                "a string of {length} bytes, but only {} bytes of file remain: truncated or damaged",
                self.left()
            )));
        }
        if length > limit {
            return Err(self.broken(format!("a string of {length} bytes, the limit is {limit}")));
        }
        self.take(length)
    }

    /// Magic, version and counts: (tensors, keys).
    fn start(&mut self) -> Result<(u64, u64), CheckpointError> {
        let magic: [u8; 4] = self.array()?;
        if magic != *b"GGUF" {
            return Err(CheckpointError::NotACheckpoint {
                path: self.path.to_path_buf(),
                what: format!(
                    "it starts with the bytes \"{}\", not with the magic bytes \"GGUF\"{}",
                    magic.escape_ascii(),
                    match &magic {
                        b"lmgg" | b"fmgg" | b"tjgg" =>
                            " (an older GGML format: convert it to GGUF)",
                        _ => "",
                    }
                ),
            });
        }
        let version = self.u32()?;
        let refused = |what| CheckpointError::Version {
            path: self.path.to_path_buf(),
            what,
        };
        match version {
            1..=3 => self.narrow = version == 1,
            v if (1..=3).contains(&v.swap_bytes()) => {
                return Err(refused(format!(
                    "a big-endian GGUF (version {}): only little-endian files work, convert it",
                    v.swap_bytes()
                )));
            }
            v => {
                return Err(refused(format!(
                    "unsupported GGUF version {v}: versions 1 to 3 work"
                )));
            }
        }
        let tensors = self.length()?;
        let keys = self.length()?;
        let most = MAX_TENSORS as u64;
        if tensors > most {
            return Err(CheckpointError::limit(
                self.path,
                "tensors declared",
                tensors,
                most,
            ));
        }
        if keys > MAX_KEYS {
            return Err(CheckpointError::limit(
                self.path,
                "metadata keys declared",
                keys,
                MAX_KEYS,
            ));
        }
        Ok((tensors, keys))
    }

    /// Reads the key-value pairs; returns the alignment.
    fn keys(&mut self, count: u64, header: &mut Header) -> Result<u64, CheckpointError> {
        let mut seen = HashSet::new();
        let mut alignment = DEFAULT_ALIGNMENT;
        for i in 0..count {
            self.place = format!("metadata key {} of {count}", i + 1);
            let key = String::from_utf8_lossy(self.string(MAX_KEY)?)
                .trim_end_matches('\0')
                .to_string();
            self.place = format!("metadata key `{}`", shown(&key));
            let kind = self.u32()?;
            match key.as_str() {
                "general.alignment" => alignment = self.alignment(kind)?,
                "split.no" => header.split_no = Some(self.integer(kind)?),
                "split.count" => header.split_count = Some(self.integer(kind)?),
                "split.tensors.count" => header.split_tensors = Some(self.integer(kind)?),
                k if k.starts_with("general.") && kind == STRING => {
                    let text = self.string(MAX_HEADER)?;
                    if text.len() <= MAX_KEPT {
                        let text = String::from_utf8_lossy(text)
                            .trim_end_matches('\0')
                            .to_string();
                        header.general.push((key.clone(), text));
                    }
                }
                k => {
                    header.vocabulary |= k == "tokenizer.ggml.tokens";
                    self.skip(kind, 0)?;
                }
            }
            if let Some(key) = seen.replace(key) {
                return Err(CheckpointError::Duplicate {
                    path: self.path.to_path_buf(),
                    what: format!("metadata key `{}`", shown(&key)),
                });
            }
        }
        Ok(alignment)
    }

    fn alignment(&mut self, kind: u32) -> Result<u64, CheckpointError> {
        let value = self.integer(kind)?;
        u64::try_from(value)
            .ok()
            .filter(|a| a.is_power_of_two() && a.is_multiple_of(8))
            .ok_or_else(|| {
                self.broken(format!("{value}, where a power of two from 8 on is needed"))
            })
    }

    fn integer(&mut self, kind: u32) -> Result<i128, CheckpointError> {
        Ok(match kind {
            0 => u8::from_le_bytes(self.array()?).into(),
            1 => i8::from_le_bytes(self.array()?).into(),
            2 => u16::from_le_bytes(self.array()?).into(),
            3 => i16::from_le_bytes(self.array()?).into(),
            4 => u32::from_le_bytes(self.array()?).into(),
            5 => i32::from_le_bytes(self.array()?).into(),
            10 => u64::from_le_bytes(self.array()?).into(),
            11 => i64::from_le_bytes(self.array()?).into(),
            _ => {
                return Err(self.broken(format!(
                    "a value of type {kind}, where an integer is needed"
                )));
            }
        })
    }

    /// Passes over a value. Its bytes are kept in the verbatim header, and only there.
    fn skip(&mut self, kind: u32, depth: u32) -> Result<(), CheckpointError> {
        if let Some(size) = fixed_size(kind) {
            return self.skip_fixed(kind, size);
        }
        match kind {
            STRING => self.string(MAX_HEADER).map(|_| ()),
            ARRAY if depth == MAX_DEPTH => {
                Err(self.broken(format!("arrays are nested deeper than {MAX_DEPTH}")))
            }
            ARRAY => self.skip_array(depth + 1),
            _ => Err(self.broken(format!("a value of type {kind}, which GGUF does not have"))),
        }
    }

    fn skip_fixed(&mut self, kind: u32, bytes: u64) -> Result<(), CheckpointError> {
        let values = self.take(bytes)?;
        // candle refuses such a header, and engines read this one with candle.
        match values.iter().find(|v| kind == BOOL && **v > 1).copied() {
            Some(v) => Err(self.broken(format!("a truth value of {v}, where 0 or 1 is needed"))),
            None => Ok(()),
        }
    }

    fn skip_array(&mut self, depth: u32) -> Result<(), CheckpointError> {
        let kind = self.u32()?;
        let length = self.length()?;
        let prefix = if self.narrow { 4 } else { 8 };
        let smallest = match kind {
            STRING => prefix,
            ARRAY => 4 + prefix,
            _ => fixed_size(kind).unwrap_or(1),
        };
        let bytes = length.checked_mul(smallest).filter(|b| *b <= self.left());
        let Some(bytes) = bytes else {
            return Err(self.broken(format!(
                "an array of {length} elements of type {kind}, but only {} bytes of file remain: truncated \
                 or damaged",
                self.left()
            )));
        };
        if fixed_size(kind).is_some() {
            return self.skip_fixed(kind, bytes);
        }
        for _ in 0..length {
            self.skip(kind, depth)?;
        }
        Ok(())
    }

    fn tensors(
        &mut self,
        count: u64,
        file: usize,
        header: &mut Header,
    ) -> Result<(), CheckpointError> {
        for i in 0..count {
            self.place = format!("tensor {} of {count}", i + 1);
            let name = self.string(MAX_NAME as u64)?.to_vec();
            // Some writers end their strings with zeros; candle takes them off too.
            let name = String::from_utf8(name)
                .map_err(|_| self.broken("its name is not UTF-8"))?
                .trim_end_matches('\0')
                .to_string();
            self.place.clear();
            self.place.push_str("tensor `");
            self.place.push_str(&shown(&name));
            self.place.push('`');
            let dims = self.u32()?;
            if dims > MAX_DIMS {
                return Err(self.broken(format!("{dims} dimensions, the limit is {MAX_DIMS}")));
            }
            let mut shape = Vec::with_capacity(dims as usize);
            for _ in 0..dims {
                shape.push(self.length()?);
            }
            // The file has the innermost dimension first.
            shape.reverse();
            let number = self.u32()?;
            let offset = self.u64()?;
            let Some(element) = types::element(number) else {
                header.unknown.push(UnknownType {
                    tensor: name,
                    number,
                });
                continue;
            };
            let Some(bytes) = element.bytes(&shape) else {
                return Err(self.broken(format!(
                    "{element} of shape {shape:?}: rows are not whole blocks of {}, or its size overflows",
                    element.block_elements()
                )));
            };
            header.tensors.push(SourceTensor {
                name,
                element,
                shape,
                file,
                offset,
                bytes,
                slice: None,
            });
        }
        Ok(())
    }

    /// Ends the header at the tensor data and returns where that is.
    fn data_start(&mut self, alignment: u64, header: &Header) -> Result<u64, CheckpointError> {
        self.place = "the padding".into();
        let end = self.at as u64;
        let data = end
            .checked_next_multiple_of(alignment)
            .ok_or_else(|| self.broken(format!("the alignment {alignment} overflows")))?;
        let with_data = header.tensors.iter().any(|t| t.bytes > 0);
        if data <= self.source.receipt.bytes || with_data {
            self.take(data - end)?;
        }
        self.bytes.truncate(self.at);
        self.bytes.shrink_to_fit();
        Ok(data)
    }
}

const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// Bytes of a value whose type says its size.
fn fixed_size(kind: u32) -> Option<u64> {
    Some(match kind {
        0 | 1 | BOOL => 1,
        2 | 3 => 2,
        4..=6 => 4,
        10..=12 => 8,
        _ => return None,
    })
}
