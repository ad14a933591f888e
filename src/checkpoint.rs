//! Where tensors come from: safetensors and GGUF, single, sharded or split, and the small files beside them.
//! Headers are parsed, with caps; tensor bytes are only ever copied.

use std::path::Path;

use crate::key::Receipt;
use crate::manifest::{Digest, ElementType};

/// How to choose among what lies in a folder.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// File variant, for instance `fp16` for `model.fp16.safetensors`.
    pub variant: Option<String>,
}

/// One file that tensors are read from.
#[derive(Debug)]
pub struct SourceFile {
    /// The open file.
    pub file: std::fs::File,
    /// What it looked like when it was opened.
    pub receipt: Receipt,
}

/// One tensor's place in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTensor {
    /// Its name.
    pub name: String,
    /// How its elements are stored.
    pub element: ElementType,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Index into [`Checkpoint::files`].
    pub file: usize,
    /// Bytes from the file's start.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A checkpoint whose headers have been read and found whole.
#[derive(Debug)]
pub struct Checkpoint {
    /// Name for an entry that no name was given for: the file's stem or the folder's name.
    pub name: String,
    /// Files that tensors lie in.
    pub files: Vec<SourceFile>,
    /// Tensors, sorted by name, each name once.
    pub tensors: Vec<SourceTensor>,
    /// Small files that travel with the weights: name relative to the folder, bytes.
    pub small_files: Vec<(String, Vec<u8>)>,
    /// Strings that travel with the weights.
    pub attributes: Vec<(String, String)>,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {}

impl Checkpoint {
    /// Opens a folder, a `.safetensors` file, an index file, or a `.gguf` file, and reads its headers.
    ///
    /// # Errors
    /// Names the file or tensor that is wrong, and the way out.
    pub fn open(_path: &Path, _options: &Options) -> Result<Self, CheckpointError> {
        unimplemented!()
    }

    /// Fills `buffer` with the tensor's bytes from `at` on.
    ///
    /// # Errors
    /// When the file cannot be read, or has become shorter.
    pub fn read_at(
        &self,
        _tensor: &SourceTensor,
        _at: u64,
        _buffer: &mut [u8],
    ) -> Result<(), CheckpointError> {
        unimplemented!()
    }

    /// Checks that no file has changed since its header was read.
    ///
    /// # Errors
    /// Names the file that did.
    pub fn check_unchanged(&self) -> Result<(), CheckpointError> {
        unimplemented!()
    }

    /// The digest of a tensor's bytes.
    ///
    /// # Errors
    /// As [`Checkpoint::read_at`].
    pub fn digest(&self, _tensor: &SourceTensor) -> Result<Digest, CheckpointError> {
        unimplemented!()
    }
}
