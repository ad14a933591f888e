//! GGUF files, whole or split by `-00001-of-00003.gguf`: any part names the set.
//! The first part's header travels verbatim, as small file [`HEADER_NAME`].

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::error::{count, shown};
use super::source::open;
use super::{CheckpointError, SourceFile, SourceTensor, folder};
use crate::manifest::MAX_TENSORS;

mod header;
pub(super) mod types;

/// Name of the small file that holds the header.
pub(super) const HEADER_NAME: &str = "gguf.header";

/// What a GGUF file, or a set of parts, holds.
pub(super) struct Set {
    pub(super) files: Vec<SourceFile>,
    pub(super) tensors: Vec<SourceTensor>,
    /// The strings among the `general.*` keys of the first part.
    pub(super) general: Vec<(String, String)>,
    /// Everything before the first part's tensor data.
    pub(super) header: Vec<u8>,
}

/// A file name that says which part of how many it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PartName {
    pub(super) base: String,
    pub(super) number: u32,
    pub(super) of: u32,
}

/// Takes `tiny-00001-of-00003` apart. `None` where a stem is not of that form.
pub(super) fn part_name(stem: &str) -> Option<PartName> {
    let digits = |s: &str| {
        (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit()))
            .then(|| s.parse().ok())
            .flatten()
    };
    let (rest, of) = stem.rsplit_once("-of-")?;
    let (base, number) = rest.rsplit_once('-')?;
    Some(PartName {
        base: base.into(),
        number: digits(number)?,
        of: digits(of)?,
    })
}

/// Reads the headers of the set that the file at `path` belongs to.
pub(super) fn read(path: &Path) -> Result<Set, CheckpointError> {
    let parts = parts(path)?;
    let mut set = Set {
        files: Vec::new(),
        tensors: Vec::new(),
        general: Vec::new(),
        header: Vec::new(),
    };
    let mut unknown = Vec::new();
    let mut declared = None;
    let mut vocabulary = false;
    for (i, part) in parts.iter().enumerate() {
        let source = open(part)?;
        let header = header::read(&source, part, i)?;
        check_numbers(part, i, parts.len(), &header)?;
        declared = declared.or(header.split_tensors);
        vocabulary |= header.vocabulary;
        unknown.extend(header.unknown);
        set.tensors.extend(header.tensors);
        set.files.push(source);
        if i == 0 {
            set.general = header.general;
            set.header = header.bytes;
        }
        let found = set.tensors.len() + unknown.len();
        if found > MAX_TENSORS {
            return Err(CheckpointError::limit(
                part,
                "tensors",
                found as u64,
                MAX_TENSORS as u64,
            ));
        }
    }
    let found = set.tensors.len() + unknown.len();
    if parts.len() > 1
        && let Some(declared) = declared
        && declared != found as i128
    {
        return Err(CheckpointError::Split {
            path: parts[0].clone(),
            what: format!(
                "split.tensors.count is {declared}, its {} hold {found}: the parts are not of one model, or \
                 one is damaged",
                count(parts.len(), "part")
            ),
        });
    }
    if found == 0 {
        return Err(CheckpointError::NoTensors {
            path: parts[0].clone(),
            what: if vocabulary {
                ": it is a vocabulary only; give the file with the weights".into()
            } else {
                String::new()
            },
        });
    }
    if !unknown.is_empty() {
        return Err(CheckpointError::UnknownTypes {
            path: parts[0].clone(),
            tensors: unknown,
        });
    }
    check_names(&parts, &set.tensors)?;
    Ok(set)
}

/// The files of the set, in order. Every one that is missing is in the error.
fn parts(path: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let stem = path.file_stem().and_then(|s| s.to_str());
    let Some(name) = stem.and_then(part_name) else {
        return Ok(vec![path.to_path_buf()]);
    };
    if name.number == 0 || name.number > name.of {
        return Err(CheckpointError::Split {
            path: path.to_path_buf(),
            what: format!("its name says part {} of {}", name.number, name.of),
        });
    }
    let ending = path.extension().and_then(|e| e.to_str()).unwrap_or("gguf");
    let at = |i| path.with_file_name(format!("{}-{i:05}-of-{:05}.{ending}", name.base, name.of));
    let parts: Vec<_> = (1..=name.of).map(at).collect();
    let missing: Vec<_> = parts
        .iter()
        .filter(|p| std::fs::metadata(p).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound))
        .filter_map(|p| Some(p.file_name()?.to_string_lossy().into_owned()))
        .collect();
    if missing.is_empty() {
        return Ok(parts);
    }
    Err(CheckpointError::MissingFiles {
        path: path.to_path_buf(),
        missing,
        hint: folder::interrupted_hint(path.parent().unwrap_or(Path::new(""))),
    })
}

/// Checks what a part says of its own place against its name.
fn check_numbers(
    part: &Path,
    i: usize,
    of: usize,
    header: &header::Header,
) -> Result<(), CheckpointError> {
    let wrong = |what| {
        Err(CheckpointError::Split {
            path: part.to_path_buf(),
            what,
        })
    };
    match header.split_count {
        Some(count) if count > 1 && of == 1 => wrong(format!(
            "it is one of {count} parts (split.count) and its name does not say which: name the parts \
             NAME-00001-of-{count:05}.gguf and so on"
        )),
        Some(count) if of > 1 && count != of as i128 => {
            wrong(format!("split.count is {count}, its name says {of} parts"))
        }
        _ => match header.split_no {
            Some(no) if of > 1 && no != i as i128 => wrong(format!(
                "split.no is {no} (part {}), its name says part {}",
                no.saturating_add(1),
                i + 1
            )),
            _ => Ok(()),
        },
    }
}

fn check_names(parts: &[PathBuf], tensors: &[SourceTensor]) -> Result<(), CheckpointError> {
    let mut seen: HashMap<&str, usize> = HashMap::with_capacity(tensors.len());
    for t in tensors {
        if let Some(other) = seen.insert(&t.name, t.file) {
            let name = shown(&t.name);
            return Err(CheckpointError::Duplicate {
                path: parts[t.file].clone(),
                what: if other == t.file {
                    format!("tensor `{name}`")
                } else {
                    format!("tensor `{name}` (also in {})", parts[other].display())
                },
            });
        }
    }
    Ok(())
}
