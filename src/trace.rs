//! What a model asked its weights for: names, shapes, dtypes, shards, and names that it only looked for.
//! A [`Trace`] is recorded by an engine, kept as JSON, and handed to a load that is to hold no more than that.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::manifest::{ElementType, MAX_NAME, MAX_RANK, MAX_TENSORS, capped};

/// Version of the format. Readers accept this one only.
pub const VERSION: u32 = 1;
/// Largest file, in bytes.
pub const MAX_BYTES: u64 = 256 << 20;
/// Most requests, and most lookups, of one trace.
pub const MAX_ENTRIES: usize = MAX_TENSORS;
/// Most parts that a tensor is cut into.
pub const MAX_SHARDS: u32 = 1 << 16;

/// What a model asked for.
///
/// As JSON, one object:
///
/// ```json
/// {"version": 1,
///  "tensors": [{"name": "lm_head.weight", "shape": [128256, 4096], "dtype": "BF16", "shard": null},
///              {"name": "model.layers.0.mlp.up_proj.weight", "shape": null, "dtype": "BF16",
///               "shard": {"dim": 0, "rank": 0, "size": 2}}],
///  "lookups": ["lm_head.bias"]}
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trace {
    version: u32,
    /// Requests, each of them once. A name that was asked for in several ways stands several times.
    #[serde(deserialize_with = "capped::<_, _, MAX_ENTRIES>")]
    pub tensors: Vec<Asked>,
    /// Names that were asked for in no other way than whether they are there.
    #[serde(default, deserialize_with = "capped::<_, _, MAX_ENTRIES>")]
    pub lookups: Vec<String>,
}

/// One request for a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// The tensor, as the checkpoint names it.
    pub name: String,
    /// The shape that the model wants, outermost dimension first. `None` where it takes whatever there is, as with
    /// `get_unchecked` and under a shard.
    #[serde(default, deserialize_with = "short")]
    pub shape: Option<Vec<u64>>,
    /// The dtype that the model wants, in the spelling of safetensors or GGML. `None`: as it is stored.
    #[serde(default, with = "spelt")]
    pub dtype: Option<ElementType>,
    /// The part that this rank wants; `None`: all of it.
    #[serde(default)]
    pub shard: Option<ShardHint>,
}

/// A tensor's part for one rank: equal slices along one dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardHint {
    /// The dimension that is cut, outermost first.
    pub dim: u32,
    /// Which slice, from 0.
    pub rank: u32,
    /// How many slices.
    pub size: u32,
}

/// Why a file is no trace, or could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The system refuses.
    #[error("the trace {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// It is no JSON, or not the object that a trace is.
    #[error(
        "the trace {}: {source}; a trace is what `IpcCache::trace()` gives and `Trace::write` writes",
        path.display()
    )]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        source: serde_json::Error,
    },
    /// Written by another version of this software.
    #[error(
        "the trace {} has version {found}, this build reads version {VERSION}: record it again with the release that \
         is to read it",
        path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version found.
        found: u64,
    },
    /// A number exceeds its limit.
    #[error("the trace {} has {found} {what}, the limit is {limit}", path.display())]
    Limit {
        /// The file.
        path: PathBuf,
        /// What is counted.
        what: &'static str,
        /// The count, or more than the limit where nobody counted on.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A request does not hold together.
    #[error("the trace {}: tensor `{name}`: {what}", path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What does not hold.
        what: String,
    },
}

impl Default for Trace {
    fn default() -> Self {
        Self::new(Vec::new(), Vec::new())
    }
}

impl Trace {
    /// A trace of these requests and lookups. What stands twice is kept once; a lookup of a name that was also
    /// asked for is left out.
    pub fn new(mut tensors: Vec<Asked>, mut lookups: Vec<String>) -> Self {
        let mut seen = HashSet::with_capacity(tensors.len());
        tensors.retain(|asked| seen.insert(asked.clone()));
        let names: HashSet<&str> = tensors.iter().map(|t| t.name.as_str()).collect();
        lookups.retain(|name| !names.contains(name.as_str()));
        let mut seen = HashSet::with_capacity(lookups.len());
        lookups.retain(|name| seen.insert(name.clone()));
        Self {
            version: VERSION,
            tensors,
            lookups,
        }
    }

    /// Reads a trace that [`Trace::write`] wrote, or that was written by hand.
    ///
    /// # Errors
    /// Names the file and the first thing in it that does not hold.
    pub fn read(path: impl AsRef<Path>) -> Result<Self, TraceError> {
        let path = path.as_ref();
        let file_error = |source| TraceError::File {
            path: path.into(),
            source,
        };
        let meta = std::fs::metadata(path).map_err(file_error)?;
        if !meta.is_file() {
            return Err(file_error(std::io::Error::other("it is no regular file")));
        }
        let len = usize::try_from(meta.len()).unwrap_or(usize::MAX);
        within(path, "bytes", len, MAX_BYTES)?;
        let mut bytes = Vec::new();
        let file = File::open(path).map_err(file_error)?;
        file.take(MAX_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(file_error)?;
        Self::parse(&bytes, path)
    }

    /// Writes the trace as JSON, in place of what is there.
    ///
    /// # Errors
    /// When it is one that [`Trace::read`] would refuse, or the system does.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<(), TraceError> {
        let path = path.as_ref();
        self.check(path)?;
        let mut text = serde_json::to_vec(self).map_err(|source| TraceError::Json {
            path: path.into(),
            source,
        })?;
        text.push(b'\n');
        within(path, "bytes", text.len(), MAX_BYTES)?;
        std::fs::write(path, text).map_err(|source| TraceError::File {
            path: path.into(),
            source,
        })
    }

    /// Every name that was asked for, each once, in the order of the first requests. Lookups are not among them.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let mut seen = HashSet::new();
        let names = self.tensors.iter().map(|asked| asked.name.as_str());
        names.filter(move |name| seen.insert(*name))
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self, TraceError> {
        #[derive(Deserialize)]
        struct Head {
            version: u64,
        }
        within(path, "bytes", bytes.len(), MAX_BYTES)?;
        let json = |source| TraceError::Json {
            path: path.into(),
            source,
        };
        // Another version may have other fields: its number comes first.
        let found = serde_json::from_slice::<Head>(bytes).map_err(json)?.version;
        if found != u64::from(VERSION) {
            return Err(TraceError::Version {
                path: path.into(),
                found,
            });
        }
        let trace: Self = serde_json::from_slice(bytes).map_err(json)?;
        trace.check(path)?;
        Ok(trace)
    }

    fn check(&self, path: &Path) -> Result<(), TraceError> {
        let limit = MAX_ENTRIES as u64;
        within(path, "tensors", self.tensors.len(), limit)?;
        within(path, "lookups", self.lookups.len(), limit)?;
        let wrong = |name: &str, what: String| TraceError::Entry {
            path: path.into(),
            name: name.chars().take(100).collect(),
            what,
        };
        let names = self.tensors.iter().map(|t| &t.name).chain(&self.lookups);
        for name in names {
            if name.is_empty() || name.len() > MAX_NAME {
                let len = name.len();
                return Err(wrong(
                    name,
                    format!("its name has {len} bytes, it must be 1 to {MAX_NAME}"),
                ));
            }
        }
        for Asked {
            name, shape, shard, ..
        } in &self.tensors
        {
            let rank = shape.as_ref().map_or(MAX_RANK, Vec::len);
            if rank > MAX_RANK {
                return Err(wrong(
                    name,
                    format!("{rank} dimensions, the limit is {MAX_RANK}"),
                ));
            }
            if let Some(ShardHint { dim, rank, size }) = *shard {
                if dim as usize >= MAX_RANK {
                    return Err(wrong(
                        name,
                        format!("shard along dimension {dim}, the last is {}", MAX_RANK - 1),
                    ));
                }
                if size == 0 || size > MAX_SHARDS || rank >= size {
                    return Err(wrong(
                        name,
                        format!(
                            "shard {rank} of {size}: ranks run from 0, and there are 1 to {MAX_SHARDS} shards"
                        ),
                    ));
                }
            }
        }
        Ok(())
    }
}

fn within(path: &Path, what: &'static str, found: usize, limit: u64) -> Result<(), TraceError> {
    let found = found as u64;
    if found > limit {
        return Err(TraceError::Limit {
            path: path.into(),
            what,
            found,
            limit,
        });
    }
    Ok(())
}

/// A shape of no more dimensions than a tensor may have.
fn short<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<Vec<u64>>, D::Error> {
    #[derive(Deserialize)]
    struct Short(#[serde(deserialize_with = "capped::<_, _, MAX_RANK>")] Vec<u64>);
    Ok(Option::<Short>::deserialize(from)?.map(|short| short.0))
}

/// Element types as safetensors and GGML spell them.
mod spelt {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use crate::manifest::ElementType;

    pub(super) fn serialize<S: Serializer>(
        element: &Option<ElementType>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match element {
            Some(element) => to.serialize_str(element.as_str()),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<ElementType>, D::Error> {
        let Some(text) = Option::<String>::deserialize(from)? else {
            return Ok(None);
        };
        let mut all = ElementType::ALL.iter();
        let found = all.find(|element| element.as_str() == text);
        let unknown = || {
            let shown: String = text.chars().take(100).collect();
            D::Error::custom(format!("there is no dtype `{shown}`"))
        };
        found.copied().map(Some).ok_or_else(unknown)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Trace, TraceError> {
        Trace::parse(text.as_bytes(), Path::new("t.json"))
    }

    fn asked(name: &str) -> Asked {
        Asked {
            name: name.into(),
            shape: Some(vec![4, 2]),
            dtype: Some(ElementType::F8E4M3),
            shard: Some(ShardHint {
                dim: 1,
                rank: 0,
                size: 2,
            }),
        }
    }

    #[test]
    fn a_trace_that_was_written_is_read_as_it_was() {
        let bare = Asked {
            shape: None,
            dtype: None,
            shard: None,
            ..asked("b")
        };
        let trace = Trace::new(vec![asked("a"), bare], vec!["c".into()]);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        trace.write(&path).unwrap();
        assert_eq!(Trace::read(&path).unwrap(), trace);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"version":1,"tensors":[{"name":"a","shape":[4,2],"dtype":"F8_E4M3","shard":{"dim":1,"rank":0,"size":2}},"#,
                r#"{"name":"b","shape":null,"dtype":null,"shard":null}],"lookups":["c"]}"#,
                "\n"
            )
        );
    }

    #[test]
    fn what_is_null_may_be_left_out() {
        let trace = parse(r#"{"version":1,"tensors":[{"name":"a"}]}"#).unwrap();
        assert_eq!(trace.names().collect::<Vec<_>>(), ["a"]);
        assert_eq!(
            (trace.tensors[0].shape.clone(), trace.lookups.len()),
            (None, 0)
        );
    }

    #[test]
    fn a_request_stands_once_and_makes_its_lookup_needless() {
        let trace = Trace::new(
            vec![asked("a"), asked("a")],
            vec!["a".into(), "b".into(), "b".into()],
        );
        assert_eq!(
            (trace.tensors.len(), &*trace.lookups),
            (1, &["b".to_string()][..])
        );
    }

    #[test]
    fn what_is_no_trace_is_refused_by_what_is_wrong_with_it() {
        let long = "n".repeat(MAX_NAME + 1);
        for (text, said) in [
            ("", "EOF"),
            ("[]", "expected"),
            (r#"{"tensors":[]}"#, "version"),
            (r#"{"version":2,"requests":[]}"#, "version 2"),
            (r#"{"version":1,"tensors":[],"extra":0}"#, "extra"),
            (r#"{"version":1,"tensors":[{"name":""}]}"#, "0 bytes"),
            (
                &format!(r#"{{"version":1,"tensors":[{{"name":"{long}"}}]}}"#),
                "1025 bytes",
            ),
            (
                &format!(r#"{{"version":1,"tensors":[],"lookups":["{long}"]}}"#),
                "1025 bytes",
            ),
            (
                r#"{"version":1,"tensors":[{"name":"a","dtype":"BF17"}]}"#,
                "`BF17`",
            ),
            (
                r#"{"version":1,"tensors":[{"name":"a","shape":[-1]}]}"#,
                "-1",
            ),
            (
                r#"{"version":1,"tensors":[{"name":"a","shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}]}"#,
                "16",
            ),
            (
                r#"{"version":1,"tensors":[{"name":"a","shard":{"dim":0,"rank":2,"size":2}}]}"#,
                "shard 2 of 2",
            ),
            (
                r#"{"version":1,"tensors":[{"name":"a","shard":{"dim":0,"rank":0,"size":0}}]}"#,
                "shard 0 of 0",
            ),
            (
                r#"{"version":1,"tensors":[{"name":"a","shard":{"dim":16,"rank":0,"size":2}}]}"#,
                "dimension 16",
            ),
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(error.contains(said) && error.contains("t.json"), "{error}");
        }
    }

    #[test]
    fn a_trace_beyond_its_limits_is_neither_read_nor_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        let many = vec!["\"a\""; MAX_ENTRIES + 1].join(",");
        let text = format!(r#"{{"version":1,"tensors":[],"lookups":[{many}]}}"#);
        assert!(parse(&text).unwrap_err().to_string().contains("1048576"));
        let file = File::create(&path).unwrap();
        file.set_len(MAX_BYTES + 10).unwrap();
        let error = Trace::read(&path).unwrap_err();
        assert!(
            matches!(error, TraceError::Limit { what: "bytes", .. }),
            "{error}"
        );
        let trace = Trace::new(vec![asked("")], Vec::new());
        assert!(matches!(trace.write(&path), Err(TraceError::Entry { .. })));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MAX_BYTES + 10);
        let error = Trace::read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("regular file"), "{error}");
    }
}
