//! Importance matrices, in the format that candle and llama.cpp's `imatrix` program write: for each tensor, how much
//! each column of it matters. Every length in the file is checked before memory is taken for it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use super::names;
use crate::manifest::Digest;

/// Most bytes of a file: one F32 for each column of each tensor.
const MAX_BYTES: u64 = 1 << 30;
const MAX_ENTRIES: usize = 1 << 20;
const MAX_NAME: usize = 4096;

/// How much each column matters, by tensor name.
#[derive(Debug)]
pub struct Imatrix {
    columns: HashMap<String, Arc<[f32]>>,
    digest: Digest,
    path: String,
}

/// Why a file is no importance matrix.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImatrixError {
    /// It cannot be read.
    #[error("the importance matrix {path}: {source}")]
    File {
        /// The file.
        path: String,
        /// What the system says.
        source: std::io::Error,
    },
    /// Its contents are not what such a file holds.
    #[error(
        "the importance matrix {path}: {what}; give the binary file that llama.cpp's `imatrix` program writes (`.dat`)"
    )]
    Format {
        /// The file.
        path: String,
        /// What is wrong.
        what: String,
    },
}

impl Imatrix {
    /// Reads a file.
    ///
    /// # Errors
    /// Names the file, and what is wrong with it.
    pub fn read(path: &Path) -> Result<Self, ImatrixError> {
        let shown = path.display().to_string();
        let system = |source| ImatrixError::File {
            path: shown.clone(),
            source,
        };
        let wrong = |what: String| ImatrixError::Format {
            path: shown.clone(),
            what,
        };
        let meta = std::fs::metadata(path).map_err(system)?;
        if !meta.is_file() {
            return Err(system(std::io::Error::other("it is no regular file")));
        }
        if meta.len() > MAX_BYTES {
            let limit = MAX_BYTES;
            return Err(wrong(format!(
                "it has {} bytes, the limit is {limit}",
                meta.len()
            )));
        }
        let mut bytes = Vec::new();
        BufReader::new(File::open(path).map_err(system)?)
            .take(MAX_BYTES)
            .read_to_end(&mut bytes)
            .map_err(system)?;
        if bytes.starts_with(b"GGUF") {
            return Err(wrong(
                "it is a GGUF file, which candle does not read as one".into(),
            ));
        }
        Ok(Self {
            columns: parse(&bytes).map_err(wrong)?,
            digest: Digest::of(&bytes),
            path: shown.clone(),
        })
    }

    /// The digest of the file.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The file's path, as it was given.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The entry for a tensor: under its own name, or under the GGUF name of the same tensor.
    pub fn of(&self, tensor: &str) -> Option<&Arc<[f32]>> {
        self.columns.get(tensor)
    }
}

fn parse(bytes: &[u8]) -> Result<HashMap<String, Arc<[f32]>>, String> {
    let mut at = Reader { bytes, at: 0 };
    let entries = at.count("the number of entries", MAX_ENTRIES)?;
    if entries == 0 {
        return Err("it has no entries".into());
    }
    let mut columns = HashMap::new();
    let mut translated = Vec::new();
    for i in 0..entries {
        let what = format!("entry {i}");
        let length = at.count(&what, MAX_NAME)?;
        let name = std::str::from_utf8(at.take(&what, length)?)
            .map_err(|_| format!("the name of {what} is not UTF-8"))?
            .to_string();
        let calls = at.number(&what)?;
        let length = at.count(&what, bytes.len() / 4)?;
        if length == 0 {
            return Err(format!("the entry `{}` has no values", name.escape_debug()));
        }
        let values = at.take(&what, length * 4)?.chunks_exact(4);
        let values: Arc<[f32]> = values
            .map(|v| {
                let v = f32::from_le_bytes([v[0], v[1], v[2], v[3]]);
                if calls == 0 { v } else { v / calls as f32 }
            })
            .collect();
        if let Some(bad) = values.iter().find(|v| !v.is_finite() || **v < 0.0) {
            return Err(format!(
                "the entry `{}` holds {bad}, which is no importance",
                name.escape_debug()
            ));
        }
        translated.extend(names::from_gguf(&name).map(|n| (n, values.clone())));
        columns.insert(name, values);
    }
    // What follows (the dataset's name, in newer files) says nothing about columns.
    for (name, values) in translated {
        columns.entry(name).or_insert(values);
    }
    Ok(columns)
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, what: &str, length: usize) -> Result<&'a [u8], String> {
        let end = self.at.checked_add(length);
        let taken = end.and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| {
            format!(
                "it ends within {what}: {} bytes are there",
                self.bytes.len()
            )
        })?;
        self.at += length;
        Ok(taken)
    }

    fn number(&mut self, what: &str) -> Result<i32, String> {
        let b = self.take(what, 4)?;
        Ok(i32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn count(&mut self, what: &str, limit: usize) -> Result<usize, String> {
        let found = self.number(what)?;
        usize::try_from(found)
            .ok()
            .filter(|n| *n <= limit)
            .ok_or_else(|| format!("a length of {found} in {what} cannot be"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(entries: &[(&str, i32, &[f32])]) -> Vec<u8> {
        let mut out = (entries.len() as i32).to_le_bytes().to_vec();
        for (name, calls, values) in entries {
            out.extend((name.len() as i32).to_le_bytes());
            out.extend(name.as_bytes());
            out.extend(calls.to_le_bytes());
            out.extend((values.len() as i32).to_le_bytes());
            out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        }
        out
    }

    fn read(bytes: &[u8]) -> Result<Imatrix, ImatrixError> {
        let file = tempfile::NamedTempFile::new().expect("file");
        std::fs::write(file.path(), bytes).expect("written");
        Imatrix::read(file.path())
    }

    #[test]
    fn a_file_reads_as_candle_reads_it() {
        let bytes = write(&[("blk.0.attn_q.weight", 2, &[1.0, 4.0]), ("x", 0, &[3.0])]);
        let file = tempfile::NamedTempFile::new().expect("file");
        std::fs::write(file.path(), &bytes).expect("written");
        let ours = Imatrix::read(file.path()).expect("a matrix");
        let candles =
            candle_core::quantized::imatrix_file::load_imatrix(file.path()).expect("candle's");
        for (name, values) in &candles {
            assert_eq!(ours.of(name).expect(name).as_ref(), values.as_slice());
        }
        let hugging_face = ours.of("model.layers.0.self_attn.q_proj.weight");
        assert_eq!(hugging_face.expect("translated").as_ref(), [0.5, 2.0]);
        assert!(ours.of("y").is_none());
    }

    #[test]
    fn damage_is_an_error_wherever_it_is() {
        let whole = write(&[("abc", 1, &[1.0, 2.0, 3.0]), ("d", 1, &[1.0])]);
        assert!(read(&whole).is_ok());
        for end in 0..whole.len() {
            assert!(read(&whole[..end]).is_err(), "cut at {end}");
        }
        let mut lies = whole.clone();
        for at in [0, 4] {
            for value in [-1i32, i32::MAX, i32::MIN, 0x0100_0000] {
                lies[at..at + 4].copy_from_slice(&value.to_le_bytes());
                let error = read(&lies).expect_err("a lie").to_string();
                assert!(error.contains("importance matrix"), "{error}");
                lies[at..at + 4].copy_from_slice(&whole[at..at + 4]);
            }
        }
        for bad in [f32::NAN, -1.0, f32::INFINITY] {
            let error = read(&write(&[("q", 1, &[bad])])).expect_err("no importance");
            assert!(error.to_string().contains("`q`"), "{error}");
        }
        assert!(
            read(b"GGUF\x03\0\0\0")
                .expect_err("GGUF")
                .to_string()
                .contains("GGUF")
        );
    }
}
