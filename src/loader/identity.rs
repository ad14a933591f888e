//! Proof that an entry's weights are the ones that the engine means.
//! Receipts can only save the work of hashing; a difference is always a difference of bytes, names, types or shapes.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use rayon::prelude::*;

use super::config::IpcConfig;
use super::error::AttachError;
use crate::checkpoint::{Checkpoint, CheckpointError, Options, SourceTensor};
use crate::key::{Difference, Freshness, Receipt};
use crate::manifest::{Manifest, TensorEntry};
use crate::protocol::EntryId;
use crate::shard::Cut;

/// Differences that a message lists before it only counts them.
const SHOWN: usize = 8;

/// How an engine knows that these are the weights that it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Proof {
    /// The root digest is the pinned one.
    Root,
    /// The files of the given checkpoint are the very ones that were loaded, untouched since.
    CheckpointUntouched,
    /// Every tensor of the given checkpoint was hashed and is equal.
    CheckpointHashed,
    /// The files that were loaded are still there, untouched since.
    SourcesUntouched,
    /// The files that were loaded have been touched; their tensors were hashed and are equal.
    SourcesHashed,
    /// The entry's name alone: not all files that were loaded can be seen from here.
    NameOnly,
    /// The entry's name alone, because the engine was told to trust it.
    Trusted,
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Root => "pinned root digest",
            Self::CheckpointUntouched => "the given checkpoint's files, untouched since the load",
            Self::CheckpointHashed => "digests of the given checkpoint's tensors",
            Self::SourcesUntouched => "the loaded files, untouched since the load",
            Self::SourcesHashed => "digests of the loaded files' tensors",
            Self::NameOnly => "name only (the loaded files cannot be seen from here)",
            Self::Trusted => "name only (trusted)",
        })
    }
}

/// In what an entry differs from what was meant.
#[derive(Debug)]
pub struct Mismatch {
    /// The entry.
    pub entry: EntryId,
    /// What it was compared with.
    pub against: String,
    /// The differences, as many as are listed.
    pub differences: Vec<Difference>,
    /// How many more there are.
    pub more: usize,
    /// The way out.
    pub advice: String,
}

impl Mismatch {
    fn new(
        entry: &EntryId,
        against: String,
        mut all: Vec<Difference>,
        advice: String,
    ) -> Box<Self> {
        let more = all.len().saturating_sub(SHOWN);
        all.truncate(SHOWN);
        Box::new(Self {
            entry: entry.clone(),
            against,
            differences: all,
            more,
            advice,
        })
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} holds other weights than {}:",
            self.entry, self.against
        )?;
        for difference in &self.differences {
            write!(f, "\n  {difference}")?;
        }
        if self.more > 0 {
            write!(f, "\n  and {} more", self.more)?;
        }
        write!(f, "\n{}", self.advice)
    }
}

impl std::error::Error for Mismatch {}

/// Finds the strongest proof that `config` asks for, or the first difference.
pub(super) fn prove(
    config: &IpcConfig,
    entry: &EntryId,
    manifest: &Manifest,
) -> Result<Proof, AttachError> {
    let named = [
        ("model", entry.name.clone(), manifest.key.model.clone()),
        (
            "shard",
            entry.shard.to_string(),
            manifest.key.shard.to_string(),
        ),
    ];
    if let Some((field, wanted, held)) = named.into_iter().find(|(_, w, h)| w != h) {
        let difference = Difference {
            field: field.into(),
            wanted,
            held,
        };
        let against = "its name says".to_string();
        let advice = reload("MODEL", entry);
        return Err(AttachError::Mismatch(Mismatch::new(
            entry,
            against,
            vec![difference],
            advice,
        )));
    }
    let pinned = match config.root {
        Some(root) if root == manifest.root => Some(Proof::Root),
        Some(root) => {
            let difference = Difference {
                field: "root digest".into(),
                wanted: root.to_string(),
                held: manifest.root.to_string(),
            };
            return Err(AttachError::Mismatch(Mismatch::new(
                entry,
                "the pinned digest says".into(),
                vec![difference],
                format!("{}, or pin the other digest", reload("MODEL", entry)),
            )));
        }
        None => None,
    };
    let compared = match &config.checkpoint {
        Some(path) => Some(by_checkpoint(path, entry, manifest)?),
        None => None,
    };
    match pinned.or(compared) {
        Some(proof) => Ok(proof),
        None if config.trust_name => Ok(Proof::Trusted),
        None => by_sources(entry, manifest),
    }
}

fn by_checkpoint(path: &Path, entry: &EntryId, manifest: &Manifest) -> Result<Proof, AttachError> {
    let unproven = |source| AttachError::Unproven {
        entry: entry.clone(),
        source: Box::new(source),
    };
    let checkpoint = Checkpoint::open(path, &Options::default()).map_err(unproven)?;
    let sources = &manifest.key.sources;
    let untouched = !sources.is_empty()
        && sources.len() == checkpoint.files.len()
        && sources
            .iter()
            .all(|s| checkpoint.files.iter().any(|f| is_same(s, &f.receipt)));
    let opened = [checkpoint];
    let differences = compare(manifest, &opened, |_| !untouched, true).map_err(unproven)?;
    if !differences.is_empty() {
        let against = format!("the checkpoint {}", path.display());
        let advice = reload(&path.display().to_string(), entry);
        return Err(AttachError::Mismatch(Mismatch::new(
            entry,
            against,
            differences,
            advice,
        )));
    }
    Ok(if untouched {
        Proof::CheckpointUntouched
    } else {
        Proof::CheckpointHashed
    })
}

/// The file that was just opened is the one that was loaded, with nothing written to it since.
fn is_same(loaded: &Receipt, opened: &Receipt) -> bool {
    loaded.same_file(opened) && loaded.freshness_at(&opened.path) == Freshness::Same
}

fn by_sources(entry: &EntryId, manifest: &Manifest) -> Result<Proof, AttachError> {
    let sources = &manifest.key.sources;
    let states: Vec<Freshness> = sources.iter().map(Receipt::freshness).collect();
    let all_seen = !states.is_empty() && !states.contains(&Freshness::Unseen);
    let Some(touched) = states.iter().position(|s| *s == Freshness::Unknown) else {
        return Ok(if all_seen {
            Proof::SourcesUntouched
        } else {
            Proof::NameOnly
        });
    };
    let unproven = |source| AttachError::Unproven {
        entry: entry.clone(),
        source: Box::new(source),
    };
    let mut opened: Vec<Checkpoint> = Vec::new();
    for (source, state) in sources.iter().zip(&states) {
        // Opening one part of a split file brings the others.
        let there = |c: &Checkpoint| c.files.iter().any(|f| f.receipt.path == source.path);
        if *state != Freshness::Unseen && !opened.iter().any(there) {
            opened.push(Checkpoint::open(&source.path, &Options::default()).map_err(unproven)?);
        }
    }
    let untouched = |receipt: &Receipt| sources.iter().any(|s| is_same(s, receipt));
    let differences = compare(manifest, &opened, |r| !untouched(r), all_seen).map_err(unproven)?;
    if !differences.is_empty() {
        let file = sources[touched].path.clone();
        let against = "that file, or the files beside it,".to_string();
        let advice = reload(&file.display().to_string(), entry);
        return Err(AttachError::Stale {
            file,
            mismatch: Mismatch::new(entry, against, differences, advice),
        });
    }
    Ok(if all_seen {
        Proof::SourcesHashed
    } else {
        Proof::NameOnly
    })
}

/// Compares what lies in `opened` with what the manifest says was loaded: names, types and shapes of
/// everything, and where those agree the bytes of every tensor whose file `must_hash`. With `whole`,
/// the manifest must not hold anything else.
fn compare(
    manifest: &Manifest,
    opened: &[Checkpoint],
    must_hash: impl Fn(&Receipt) -> bool,
    whole: bool,
) -> Result<Vec<Difference>, CheckpointError> {
    let mut differences = Vec::new();
    let mut to_hash: Vec<(&Checkpoint, Cow<'_, SourceTensor>, &TensorEntry)> = Vec::new();
    let mut seen: HashSet<&str> = HashSet::new();
    for checkpoint in opened {
        let hash: Vec<bool> = checkpoint
            .files
            .iter()
            .map(|f| must_hash(&f.receipt))
            .collect();
        for tensor in &checkpoint.tensors {
            seen.insert(&tensor.name);
            let wanted = described(tensor.element.as_str(), &tensor.shape);
            let Some(held) = manifest.find(&tensor.name) else {
                // What was left out on purpose cannot be served, so it need not be the right one.
                if !manifest.key.takes_all() {
                    continue;
                }
                differences.push(difference(&tensor.name, wanted, "no such tensor".into()));
                continue;
            };
            let held = &manifest.tensors[held];
            // Where the load converted, the stored type is not the file's; the digest below is.
            let converted = manifest.key.dtype != "stored" || manifest.key.recipe != "none";
            let same_type = tensor.element == held.element || converted;
            let tensor = match held.cut {
                None => Cow::Borrowed(tensor),
                Some(dim) => match tensor.sliced(Cut {
                    dim: dim as usize,
                    part: manifest.key.shard.tp,
                }) {
                    Ok(slice) => Cow::Owned(slice),
                    Err(e) => {
                        let held = described(held.element.as_str(), &held.shape);
                        let held = format!("a slice {held} of a tensor, and {e}");
                        differences.push(difference(&tensor.name, wanted, held));
                        continue;
                    }
                },
            };
            if tensor.shape != held.shape || !same_type {
                let held = described(held.element.as_str(), &held.shape);
                differences.push(difference(&tensor.name, wanted, held));
            } else if hash.get(tensor.file).copied().unwrap_or(true) {
                to_hash.push((checkpoint, tensor, held));
            }
        }
    }
    if whole {
        for name in manifest.names().filter(|name| !seen.contains(name)) {
            let held = manifest.find(name);
            // Its members are compared.
            if held.is_some_and(|i| manifest.is_stack(i)) {
                continue;
            }
            let held = held.map(|i| &manifest.tensors[i]);
            let held = held.map(|t| described(t.element.as_str(), &t.shape));
            differences.push(difference(
                name,
                "no such tensor".into(),
                held.unwrap_or_default(),
            ));
        }
    }
    if !differences.is_empty() {
        return Ok(differences);
    }
    let found: Vec<Option<Difference>> = to_hash
        .par_iter()
        .map(|(checkpoint, tensor, held)| {
            let digest = checkpoint.digest(tensor)?;
            Ok((digest != held.source).then(|| {
                let name = &tensor.name;
                difference(
                    name,
                    format!("digest {digest}"),
                    format!("digest {}", held.source),
                )
            }))
        })
        .collect::<Result<_, CheckpointError>>()?;
    // Bytes that were hashed while somebody wrote prove nothing.
    opened.iter().try_for_each(Checkpoint::check_unchanged)?;
    Ok(found.into_iter().flatten().collect())
}

fn difference(name: &str, wanted: String, held: String) -> Difference {
    Difference {
        field: format!("tensor `{name}`"),
        wanted,
        held,
    }
}

fn described(element: &str, shape: &[u64]) -> String {
    format!("{element} {shape:?}")
}

fn reload(model: &str, entry: &EntryId) -> String {
    let part = if entry.shard.is_whole() {
        ""
    } else {
        " with the --tp, --plan and other options that it was loaded with"
    };
    format!(
        "to serve what is meant, run `candle-cache load {model} --name {}`{part}",
        entry.name
    )
}
