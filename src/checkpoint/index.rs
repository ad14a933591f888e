//! Index files (`*.safetensors.index.json`): which shard holds which tensor.
//! The index decides: what it does not name is not loaded, and what it names must be there.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Component, Path};

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::error::shown;
use super::source::{check_is_content, open, read_exactly};
use super::{CheckpointError, SourceFile, SourceTensor, folder, safetensors};
use crate::manifest::MAX_TENSORS;

/// Largest index file, in bytes: as large as the largest header.
const MAX_INDEX: u64 = 100_000_000;
/// Longest name of a shard, in bytes: the system's own limit for paths.
const MAX_SHARD_NAME: usize = 4096;

/// What an index and its shards hold.
pub(super) struct Sharded {
    pub(super) files: Vec<SourceFile>,
    pub(super) tensors: Vec<SourceTensor>,
    /// The entries of every shard's `__metadata__`, in the order of the shards.
    pub(super) metadata: Vec<(String, String)>,
}

/// Reads the index at `path` and the headers of its shards.
pub(super) fn read(path: &Path) -> Result<Sharded, CheckpointError> {
    let map = read_map(path)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    for shard in &map.shards {
        check_inside(path, shard)?;
    }
    check_present(path, folder, &map.shards)?;
    let mut out = Sharded {
        files: Vec::new(),
        tensors: Vec::with_capacity(map.names.len()),
        metadata: Vec::new(),
    };
    for (i, shard) in map.shards.iter().enumerate() {
        let at = folder.join(shard);
        let source = open(&at)?;
        let header = safetensors::read_header(&source, &at, i)?;
        out.files.push(source);
        out.metadata.extend(header.metadata);
        let named = |t: &SourceTensor| map.names.get(&t.name) == Some(&i);
        out.tensors.extend(header.tensors.into_iter().filter(named));
    }
    if out.tensors.len() < map.names.len() {
        return Err(not_in_shard(path, &map, &out.tensors));
    }
    Ok(out)
}

fn not_in_shard(path: &Path, map: &WeightMap, found: &[SourceTensor]) -> CheckpointError {
    let found: HashSet<&str> = found.iter().map(|t| t.name.as_str()).collect();
    let mut tensors: Vec<_> = map
        .names
        .iter()
        .filter(|(name, _)| !found.contains(name.as_str()))
        .map(|(name, shard)| (name.clone(), map.shards[*shard].clone()))
        .collect();
    tensors.sort();
    CheckpointError::NotInShard {
        path: path.to_path_buf(),
        tensors,
    }
}

fn check_inside(path: &Path, shard: &str) -> Result<(), CheckpointError> {
    let inside = Path::new(shard)
        .components()
        .all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    if inside && !shard.is_empty() && shard.len() <= MAX_SHARD_NAME && !shard.contains('\0') {
        return Ok(());
    }
    Err(CheckpointError::Outside {
        path: path.to_path_buf(),
        shard: shown(shard),
    })
}

/// All missing shards in one error, before anything is opened.
fn check_present(path: &Path, folder: &Path, shards: &[String]) -> Result<(), CheckpointError> {
    let missing: Vec<_> = shards
        .iter()
        .filter(|s| {
            std::fs::metadata(folder.join(s))
                .is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
        })
        .cloned()
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(CheckpointError::MissingFiles {
        path: path.to_path_buf(),
        missing,
        hint: folder::interrupted_hint(folder),
    })
}

#[derive(Default)]
struct WeightMap {
    /// Shards, sorted by name.
    shards: Vec<String>,
    /// Tensor to index into `shards`.
    names: HashMap<String, usize>,
}

fn read_map(path: &Path) -> Result<WeightMap, CheckpointError> {
    let source = open(path)?;
    check_is_content(&source, path)?;
    let bytes = source.receipt.bytes;
    if bytes > MAX_INDEX {
        return Err(CheckpointError::limit(
            path,
            "bytes of index",
            bytes,
            MAX_INDEX,
        ));
    }
    let json = read_exactly(&source, path, 0, bytes as usize)?;
    let mut parsed = Parsed::default();
    let mut json = serde_json::Deserializer::from_slice(&json);
    IndexSeed(&mut parsed)
        .deserialize(&mut json)
        .and_then(|()| json.end())
        .map_err(|e| CheckpointError::header(path, format!("not the index it should be: {e}")))?;
    if let Some(name) = parsed.twice {
        return Err(CheckpointError::Duplicate {
            path: path.to_path_buf(),
            what: format!("tensor `{}` in weight_map", shown(&name)),
        });
    }
    if !parsed.seen {
        return Err(CheckpointError::header(path, "it has no weight_map"));
    }
    if parsed.map.names.is_empty() {
        return Err(CheckpointError::NoTensors {
            path: path.to_path_buf(),
            what: ": its weight_map is empty".into(),
        });
    }
    Ok(sorted(parsed.map))
}

/// Renumbers the shards in the order of their names, so that equal models have equal keys.
fn sorted(mut map: WeightMap) -> WeightMap {
    let mut order: Vec<usize> = (0..map.shards.len()).collect();
    order.sort_by(|a, b| map.shards[*a].cmp(&map.shards[*b]));
    let mut place = vec![0; order.len()];
    for (new, old) in order.iter().enumerate() {
        place[*old] = new;
    }
    map.shards.sort();
    for shard in map.names.values_mut() {
        *shard = place[*shard];
    }
    map
}

#[derive(Default)]
struct Parsed {
    map: WeightMap,
    numbers: HashMap<String, usize>,
    seen: bool,
    twice: Option<String>,
}

struct IndexSeed<'a>(&'a mut Parsed);

impl<'de> DeserializeSeed<'de> for IndexSeed<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for IndexSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map with a weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                // total_size and its kin are counted in different ways by different writers.
                map.next_value::<IgnoredAny>()?;
            } else if std::mem::replace(&mut self.0.seen, true) {
                return Err(A::Error::custom(
                    "weight_map is a duplicate: it stands more than once",
                ));
            } else {
                map.next_value_seed(MapSeed(self.0))?;
            }
        }
        Ok(())
    }
}

struct MapSeed<'a>(&'a mut Parsed);

impl<'de> DeserializeSeed<'de> for MapSeed<'_> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MapSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map from tensor names to shards")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let Parsed {
            map: out,
            numbers,
            twice,
            ..
        } = self.0;
        while let Some((name, shard)) = map.next_entry::<String, String>()? {
            if out.names.len() == MAX_TENSORS {
                return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
            }
            let number = match numbers.get(&shard) {
                Some(number) => *number,
                None => {
                    numbers.insert(shard.clone(), out.shards.len());
                    out.shards.push(shard);
                    out.shards.len() - 1
                }
            };
            match out.names.entry(name) {
                Entry::Vacant(free) => {
                    free.insert(number);
                }
                Entry::Occupied(taken) => {
                    twice.get_or_insert_with(|| taken.key().clone());
                }
            }
        }
        Ok(())
    }
}
