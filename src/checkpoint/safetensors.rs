//! Headers of safetensors files: parsed under caps, and checked so that every byte has one owner.
//! The format: 8 bytes of header length, JSON, and the tensors' bytes without a gap.

use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};

use super::error::shown;
use super::source::{check_is_content, read_exactly};
use super::{CheckpointError, SourceFile, SourceTensor};
use crate::manifest::{ElementType, MAX_NAME, MAX_RANK, MAX_TENSORS};

/// Largest header, in bytes: the reference implementation's own limit.
const MAX_HEADER: u64 = 100_000_000;
const METADATA: &str = "__metadata__";

/// What a file's header says.
pub(super) struct Header {
    /// Tensors, sorted by name.
    pub(super) tensors: Vec<SourceTensor>,
    /// The entries of `__metadata__`.
    pub(super) metadata: Vec<(String, String)>,
}

/// Reads and checks the header of `source`, which becomes file number `file` of its checkpoint.
pub(super) fn read_header(
    source: &SourceFile,
    path: &Path,
    file: usize,
) -> Result<Header, CheckpointError> {
    check_is_content(source, path)?;
    let total = source.receipt.bytes;
    let truncated = |what: &str, wanted| CheckpointError::Truncated {
        path: path.to_path_buf(),
        what: what.into(),
        found: total,
        wanted,
    };
    if total < 8 {
        return Err(truncated("its header", 8));
    }
    let mut length = [0; 8];
    length.copy_from_slice(&read_exactly(source, path, 0, 8)?);
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER {
        let start = read_exactly(source, path, 0, total.min(64) as usize)?;
        return Err(match looks_like(&start) {
            Some(what) => CheckpointError::NotACheckpoint {
                path: path.to_path_buf(),
                what: format!("it is {what}, whatever its name says"),
            },
            None => CheckpointError::limit(
                path,
                "bytes of header (damaged, or of another kind)",
                length,
                MAX_HEADER,
            ),
        });
    }
    let data = 8 + length;
    if data > total {
        return Err(truncated("its header", data));
    }
    let parsed = parse(path, &read_exactly(source, path, 8, length as usize)?)?;
    let tensors = check(path, parsed.tensors, data, total)?
        .into_iter()
        .map(|t| SourceTensor {
            name: t.name,
            element: t.info.dtype.0,
            shape: t.info.shape.0,
            file,
            offset: data + t.info.data_offsets.0,
            bytes: t.info.data_offsets.1 - t.info.data_offsets.0,
            slice: None,
        })
        .collect();
    Ok(Header {
        tensors,
        metadata: parsed.metadata,
    })
}

/// What the first bytes of a file that is no safetensors file say about it.
pub(super) fn looks_like(start: &[u8]) -> Option<&'static str> {
    let text = start.to_ascii_lowercase();
    let text = text.trim_ascii_start();
    if start.starts_with(b"GGUF") {
        Some("a GGUF file")
    } else if start.starts_with(b"PK\x03\x04") {
        Some("a ZIP archive, as PyTorch writes them (convert it to safetensors)")
    } else if start.starts_with(b"\x80\x02") || start.starts_with(b"\x80\x04") {
        Some("a Python pickle (convert it to safetensors)")
    } else if start.starts_with(b"\x89HDF") {
        Some("an HDF5 file (convert it to safetensors)")
    } else if text.starts_with(b"<!doctype") || text.starts_with(b"<html") {
        Some("an HTML page (a download that went wrong)")
    } else {
        None
    }
}

struct Named {
    name: String,
    info: Info,
}

#[derive(Default)]
struct Parsed {
    tensors: Vec<Named>,
    metadata: Vec<(String, String)>,
    metadata_seen: bool,
    place: Place,
}

/// Where the parser stood when it failed.
#[derive(Default)]
enum Place {
    #[default]
    Between,
    Metadata,
    Tensor(String),
    TooMany,
    MetadataTwice,
}

fn parse(path: &Path, json: &[u8]) -> Result<Parsed, CheckpointError> {
    let mut parsed = Parsed::default();
    let mut json = serde_json::Deserializer::from_slice(json);
    let done = HeaderSeed(&mut parsed)
        .deserialize(&mut json)
        .and_then(|()| json.end());
    let Err(e) = done else { return Ok(parsed) };
    Err(match parsed.place {
        Place::Between => CheckpointError::header(path, format!("not the JSON it should be: {e}")),
        Place::Metadata => {
            CheckpointError::header(path, format!("{METADATA} must map strings to strings: {e}"))
        }
        Place::MetadataTwice => CheckpointError::Duplicate {
            path: path.to_path_buf(),
            what: format!("key `{METADATA}`"),
        },
        Place::Tensor(name) => CheckpointError::tensor(path, &name, format!("broken header: {e}")),
        Place::TooMany => CheckpointError::limit(
            path,
            "tensors or more",
            MAX_TENSORS as u64 + 1,
            MAX_TENSORS as u64,
        ),
    })
}

struct HeaderSeed<'a>(&'a mut Parsed);

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tensor names to dtype, shape and offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        // A map type would keep one of two equal keys and lose the fault, so the entries are kept as they come.
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                if self.0.metadata_seen {
                    self.0.place = Place::MetadataTwice;
                    return Err(A::Error::custom("twice"));
                }
                self.0.metadata_seen = true;
                self.0.place = Place::Metadata;
                map.next_value_seed(MetadataSeed(&mut self.0.metadata))?;
            } else {
                if self.0.tensors.len() == MAX_TENSORS {
                    self.0.place = Place::TooMany;
                    return Err(A::Error::custom("too many"));
                }
                match map.next_value() {
                    Ok(info) => self.0.tensors.push(Named { name, info }),
                    Err(e) => {
                        self.0.place = Place::Tensor(name);
                        return Err(e);
                    }
                }
            }
            self.0.place = Place::Between;
        }
        Ok(())
    }
}

struct MetadataSeed<'a>(&'a mut Vec<(String, String)>);

impl<'de> DeserializeSeed<'de> for MetadataSeed<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from strings to strings, or null")
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(entry) = map.next_entry()? {
            self.0.push(entry);
        }
        Ok(())
    }
}

#[derive(Deserialize)]
struct Info {
    dtype: Dtype,
    shape: Shape,
    data_offsets: (u64, u64),
}

struct Dtype(ElementType);

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        let plain = || ElementType::ALL.iter().filter(|e| !e.is_quantized());
        match plain().find(|e| e.as_str() == name) {
            Some(element) => Ok(Self(*element)),
            None => {
                let known: Vec<_> = plain().map(|e| e.as_str()).collect();
                Err(D::Error::custom(format!(
                    "unknown dtype `{}` (known: {})",
                    shown(&name),
                    known.join(", ")
                )))
            }
        }
    }
}

struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a shape: a list of whole numbers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
        let mut dims = Vec::new();
        while let Some(dim) = seq.next_element()? {
            if dims.len() == MAX_RANK {
                return Err(de::Error::custom(format!(
                    "a shape of more than {MAX_RANK} dimensions"
                )));
            }
            dims.push(dim);
        }
        Ok(Shape(dims))
    }
}

/// Checks names, sizes and places: `data` is where the tensors' bytes start, `total` the file's length.
/// Returns the tensors sorted by name.
fn check(
    path: &Path,
    mut tensors: Vec<Named>,
    data: u64,
    total: u64,
) -> Result<Vec<Named>, CheckpointError> {
    if tensors.is_empty() {
        return Err(CheckpointError::NoTensors {
            path: path.to_path_buf(),
            what: String::new(),
        });
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    for pair in tensors.windows(2) {
        if pair[0].name == pair[1].name {
            return Err(CheckpointError::Duplicate {
                path: path.to_path_buf(),
                what: format!("tensor `{}`", shown(&pair[0].name)),
            });
        }
    }
    for t in &tensors {
        check_size(path, t)?;
    }
    let end = check_places(path, &tensors)?;
    match data.checked_add(end) {
        Some(wanted) if wanted == total => Ok(tensors),
        Some(wanted) if wanted < total => Err(CheckpointError::Trailing {
            path: path.to_path_buf(),
            found: total,
            wanted,
        }),
        wanted => Err(CheckpointError::Truncated {
            path: path.to_path_buf(),
            what: "the tensor data that its header describes".into(),
            found: total,
            wanted: wanted.unwrap_or(u64::MAX),
        }),
    }
}

fn check_size(path: &Path, t: &Named) -> Result<(), CheckpointError> {
    let wrong = |what: String| Err(CheckpointError::tensor(path, &t.name, what));
    if t.name.len() > MAX_NAME {
        return wrong(format!(
            "a name of {} bytes, the limit is {MAX_NAME}",
            t.name.len()
        ));
    }
    let Info {
        dtype: Dtype(dtype),
        shape: Shape(shape),
        data_offsets: (start, end),
    } = &t.info;
    let Some(length) = end.checked_sub(*start) else {
        return wrong(format!("its data_offsets run backwards: {start} to {end}"));
    };
    let elements = shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    match (elements, dtype.bytes(shape)) {
        (_, Some(bytes)) if bytes == length => Ok(()),
        (_, Some(bytes)) => wrong(format!(
            "{dtype} of shape {shape:?} takes {bytes} bytes, its data_offsets {start} to {end} hold {length}"
        )),
        (Some(elements), None) if !elements.is_multiple_of(dtype.block_elements()) => wrong(
            format!("{dtype} of shape {shape:?}: {elements} elements do not fill whole bytes"),
        ),
        _ => wrong(format!(
            "{dtype} of shape {shape:?}: its size in bytes overflows 64 bits"
        )),
    }
}

/// Checks that the tensors follow one another without gap or overlap; returns where the last one ends.
fn check_places(path: &Path, tensors: &[Named]) -> Result<u64, CheckpointError> {
    let mut order: Vec<&Named> = tensors.iter().collect();
    order.sort_by_key(|t| t.info.data_offsets);
    let mut end = 0;
    let mut before: Option<&Named> = None;
    for t in order {
        let (start, stop) = t.info.data_offsets;
        if start > end {
            return Err(CheckpointError::tensor(
                path,
                &t.name,
                format!("a gap before it: bytes {end} to {start} of the data belong to no tensor"),
            ));
        }
        if let Some(before) = before.filter(|_| start < end) {
            return Err(if before.info.data_offsets == (start, stop) {
                CheckpointError::SharedRange {
                    path: path.to_path_buf(),
                    first: shown(&before.name),
                    second: shown(&t.name),
                    start,
                    end,
                }
            } else {
                CheckpointError::tensor(
                    path,
                    &t.name,
                    format!(
                        "its data_offsets {start} to {stop} overlap those of `{}`, which end at {end}",
                        shown(&before.name)
                    ),
                )
            });
        }
        end = stop;
        before = Some(t);
    }
    Ok(end)
}
