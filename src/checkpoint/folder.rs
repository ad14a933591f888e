//! Which files of a folder are the model.
//! The index decides over a single file, the usual names over others, and nothing is guessed among equals.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::error::listed;
use super::gguf::{PartName, part_name};
use super::source::system;
use super::{CheckpointError, Options};

/// Most entries of a folder that are looked at.
const MAX_ENTRIES: usize = 1 << 18;
/// Most sub-folders that are looked into for a message.
const MAX_FOLDERS: usize = 64;
/// Names under which libraries look for weights, in this order.
const BASES: [&str; 2] = ["model", "diffusion_pytorch_model"];
const TENSORS: &str = ".safetensors";
const INDEX: &str = ".safetensors.index.json";
/// Endings of weights that would have to be converted first.
const FOREIGN: [&str; 7] = [".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx"];

/// What to read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Model {
    /// A safetensors file.
    Single(PathBuf),
    /// An index of safetensors files.
    Index(PathBuf),
    /// A GGUF file, or any part of a split one.
    Gguf(PathBuf),
}

/// The names in a folder, sorted. Hidden ones, and ones that are not UTF-8, are left out.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) files: Vec<String>,
    pub(super) folders: Vec<String>,
}

impl Listing {
    pub(super) fn read(path: &Path) -> Result<Self, CheckpointError> {
        let fail = |e| system(path, "listing the folder", e);
        let mut out = Self::default();
        for (i, entry) in std::fs::read_dir(path).map_err(fail)?.enumerate() {
            if i == MAX_ENTRIES {
                return Err(CheckpointError::limit(
                    path,
                    "files or more in the folder: name the file",
                    i as u64 + 1,
                    MAX_ENTRIES as u64,
                ));
            }
            let entry = entry.map_err(fail)?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            if name.starts_with('.') {
                continue;
            }
            let kind = entry.file_type().map_err(fail)?;
            let folder = kind.is_dir() || (kind.is_symlink() && path.join(&name).is_dir());
            if folder {
                out.folders.push(name);
            } else {
                out.files.push(name);
            }
        }
        out.files.sort();
        out.folders.sort();
        Ok(out)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.files
            .binary_search_by(|f| f.as_str().cmp(name))
            .is_ok()
    }

    fn ending(&self, ending: &str) -> impl Iterator<Item = &String> {
        self.files.iter().filter(move |f| f.ends_with(ending))
    }
}

/// Chooses the model among what lies in `path`.
pub(super) fn choose(
    path: &Path,
    listing: &Listing,
    options: &Options,
) -> Result<Model, CheckpointError> {
    if listing.has("model_index.json") {
        let components = with_weights(path, listing);
        if !components.is_empty() {
            return Err(CheckpointError::Components {
                path: path.to_path_buf(),
                components,
            });
        }
    }
    match &options.variant {
        Some(variant) => asked_variant(path, listing, variant),
        None => usual(path, listing).unwrap_or_else(|| other(path, listing)),
    }
}

fn asked_variant(path: &Path, listing: &Listing, variant: &str) -> Result<Model, CheckpointError> {
    for base in BASES {
        for name in [
            format!("{base}{INDEX}").replace(".json", &format!(".{variant}.json")),
            format!("{base}.{variant}{INDEX}"),
        ] {
            if listing.has(&name) {
                return Ok(Model::Index(path.join(name)));
            }
        }
        let name = format!("{base}.{variant}{TENSORS}");
        if listing.has(&name) {
            return Ok(Model::Single(path.join(name)));
        }
    }
    let ending = format!(".{variant}{TENSORS}");
    let mut others = listing.ending(&ending);
    match (others.next(), others.next()) {
        (Some(only), None) => Ok(Model::Single(path.join(only))),
        (Some(_), Some(_)) => Err(CheckpointError::Ambiguous {
            path: path.to_path_buf(),
            what: "several files of that variant",
            candidates: listing.ending(&ending).cloned().collect(),
        }),
        (None, _) => Err(CheckpointError::NoVariant {
            path: path.to_path_buf(),
            variant: Some(variant.into()),
            found: variants(listing),
        }),
    }
}

/// What the usual names lead to.
fn usual(path: &Path, listing: &Listing) -> Option<Result<Model, CheckpointError>> {
    let found = |name: String| listing.has(&name).then(|| path.join(name));
    let index = BASES.iter().find_map(|b| found(format!("{b}{INDEX}")));
    let single = || BASES.iter().find_map(|b| found(format!("{b}{TENSORS}")));
    index
        .map(Model::Index)
        .or_else(|| single().map(Model::Single))
        .map(Ok)
}

/// Without the usual names: the only thing that there is.
fn other(path: &Path, listing: &Listing) -> Result<Model, CheckpointError> {
    let ambiguous = |what, candidates| CheckpointError::Ambiguous {
        path: path.to_path_buf(),
        what,
        candidates,
    };
    let indexes: Vec<_> = listing
        .ending(INDEX)
        .filter(|n| variant_of(n.trim_end_matches(INDEX)).is_none())
        .collect();
    match indexes.as_slice() {
        [] => {}
        [only] => return Ok(Model::Index(path.join(only))),
        several => {
            return Err(ambiguous(
                "several index files",
                several.iter().map(|n| n.to_string()).collect(),
            ));
        }
    }
    let singles: Vec<_> = listing
        .ending(TENSORS)
        .filter(|n| variant_of(n.trim_end_matches(TENSORS)).is_none())
        .collect();
    let sets = gguf_sets(listing);
    match (singles.as_slice(), sets.as_slice()) {
        ([], []) => Err(nothing(path, listing)),
        ([], [set]) => Ok(Model::Gguf(path.join(set))),
        ([single], []) if !is_shard_of_several(single) => Ok(Model::Single(path.join(single))),
        (shards, []) if shards.iter().all(|s| is_shard_of_several(s)) => {
            Err(CheckpointError::NoIndex {
                path: path.to_path_buf(),
                shards: shards.iter().map(|s| s.to_string()).collect(),
            })
        }
        _ => {
            let candidates = singles.into_iter().cloned().chain(sets).collect();
            Err(ambiguous("several files could be the model", candidates))
        }
    }
}

fn is_shard_of_several(name: &str) -> bool {
    part_name(name.trim_end_matches(TENSORS)).is_some_and(|p| p.of > 1)
}

/// One file of each GGUF set: the first part that is there.
fn gguf_sets(listing: &Listing) -> Vec<String> {
    let mut sets: BTreeMap<(String, u32), String> = BTreeMap::new();
    for name in listing.ending(".gguf") {
        let stem = name.trim_end_matches(".gguf");
        let key = match part_name(stem) {
            Some(PartName { base, of, .. }) => (base, of),
            None => (stem.to_string(), 0),
        };
        sets.entry(key).or_insert_with(|| name.clone());
    }
    sets.into_values().collect()
}

/// `fp16` for the stem `model.fp16` or `model.fp16-00001-of-00002`.
fn variant_of(stem: &str) -> Option<&str> {
    let stem = match part_name(stem) {
        Some(part) => stem.get(..part.base.len())?,
        None => stem,
    };
    let mut parts = stem.splitn(2, '.');
    let base = parts.next()?;
    let base = part_name(base).map_or(base, |p| &base[..p.base.len()]);
    BASES.contains(&base).then(|| parts.next()).flatten()
}

fn variants(listing: &Listing) -> Vec<String> {
    let mut found: Vec<String> = listing
        .ending(TENSORS)
        .filter_map(|n| variant_of(n.trim_end_matches(TENSORS)))
        .map(str::to_string)
        .collect();
    found.sort();
    found.dedup();
    found
}

fn nothing(path: &Path, listing: &Listing) -> CheckpointError {
    let found = variants(listing);
    if !found.is_empty() {
        return CheckpointError::NoVariant {
            path: path.to_path_buf(),
            variant: None,
            found,
        };
    }
    let mut hint = interrupted_hint(path);
    let foreign: Vec<_> = listing
        .files
        .iter()
        .filter(|f| FOREIGN.iter().any(|e| f.ends_with(e)))
        .collect();
    if !foreign.is_empty() {
        hint.push_str(&format!(
            "; weights in another format lie there, convert them to safetensors: {}",
            listed(foreign.iter())
        ));
    }
    let below = with_weights(path, listing);
    if !below.is_empty() {
        hint.push_str(&format!(
            "; sub-folders hold weights, name one: {}",
            listed(below.iter())
        ));
    }
    CheckpointError::NothingThere {
        path: path.to_path_buf(),
        hint,
    }
}

/// Sub-folders that hold weights.
fn with_weights(path: &Path, listing: &Listing) -> Vec<String> {
    let holds = |folder: &&String| {
        std::fs::read_dir(path.join(folder)).is_ok_and(|entries| {
            entries
                .take(MAX_ENTRIES)
                .flatten()
                .filter_map(|e| e.file_name().into_string().ok())
                .any(|n| n.ends_with(TENSORS) || n.ends_with(".gguf"))
        })
    };
    listing
        .folders
        .iter()
        .take(MAX_FOLDERS)
        .filter(holds)
        .cloned()
        .collect()
}

/// Says which downloads into `folder` were interrupted; empty where there is no trace of one.
pub(super) fn interrupted_hint(folder: &Path) -> String {
    let mut places = vec![
        folder.to_path_buf(),
        folder.join(".cache/huggingface/download"),
    ];
    // A hub cache keeps blobs beside the snapshots that link to them.
    if let Ok(real) = std::fs::canonicalize(folder) {
        let snapshots = real
            .ancestors()
            .take(8)
            .find(|a| a.file_name().is_some_and(|n| n == "snapshots"));
        places.extend(snapshots.and_then(Path::parent).map(|p| p.join("blobs")));
    }
    let found: Vec<_> = places
        .iter()
        .filter_map(|p| std::fs::read_dir(p).ok())
        .flat_map(|entries| entries.take(MAX_ENTRIES).flatten())
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "incomplete"))
        .take(MAX_FOLDERS)
        .collect();
    if found.is_empty() {
        return String::new();
    }
    format!(
        "; a download was interrupted, run it again: {}",
        listed(found.iter().map(|p| p.display()))
    )
}
