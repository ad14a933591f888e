//! Where the model comes from: the cache, or the same files from disk.
//! Either way it yields the small files beside the weights, and the model built over them.

use std::collections::BTreeSet;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor, safetensors};
use candle_ipc_cache::{IpcCache, IpcConfig, QuantizedVarBuilder};
use candle_nn::VarBuilder;

use crate::chat::Manners;
use crate::dense::Dense;
use crate::errors::not_attached;
use crate::quantized::{Config, GgufFile, Llama, Quantized};
use crate::sample::Model;

/// A model's weights and the files beside them.
pub(crate) enum Weights {
    /// Shared memory that a daemon handed over.
    Cache(IpcCache),
    /// A GGUF file.
    Gguf(GgufFile),
    /// Safetensors files and the folder they lie in.
    Safetensors {
        folder: PathBuf,
        files: Vec<PathBuf>,
    },
}

/// How to build the model.
pub(crate) struct Build<'a> {
    /// Positions it must have room for, at most.
    pub(crate) context: usize,
    /// Type of a dense model's weights.
    pub(crate) dtype: DType,
    /// Where it runs.
    pub(crate) device: &'a Device,
}

impl Weights {
    /// Attaches to a daemon's entry. `path` is the checkpoint to load where there is none, as far as it is known.
    pub(crate) fn attach(config: &IpcConfig, path: Option<&Path>, device: &Device) -> Result<Self> {
        let cache = IpcCache::attach(config, device);
        Ok(Self::Cache(
            cache.map_err(|error| not_attached(error, path))?,
        ))
    }

    /// Opens a folder, a `.safetensors` file or a `.gguf` file.
    pub(crate) fn open(path: &Path, device: &Device) -> Result<Self> {
        let shown = path.display();
        if path.is_dir() {
            return Ok(Self::Safetensors {
                files: shards(path)?,
                folder: path.to_owned(),
            });
        }
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("gguf") => {
                let file = GgufFile::open(path, device).with_context(|| shown.to_string())?;
                Ok(Self::Gguf(file))
            }
            Some("safetensors") => Ok(Self::Safetensors {
                folder: path.parent().unwrap_or(Path::new("")).to_owned(),
                files: vec![path.to_owned()],
            }),
            _ => bail!("{shown} is not a folder, a .safetensors file or a .gguf file"),
        }
    }

    /// Bytes of weights that are shared with other processes; none when they come from disk.
    pub(crate) fn shared_bytes(&self) -> Option<u64> {
        match self {
            Self::Cache(cache) => Some(cache.memory_bytes()),
            _ => None,
        }
    }

    /// The tokenizer, template and stop tokens.
    pub(crate) fn manners(&self) -> Result<Manners> {
        match self {
            Self::Gguf(file) => Manners::from_gguf(file.content()),
            Self::Cache(cache) => match gguf_header(cache)? {
                Some(header) => Manners::from_gguf(&header),
                None => Manners::from_files(|name| cache.file(name).map(<[u8]>::to_vec)),
            },
            Self::Safetensors { folder, .. } => {
                Manners::from_files(|name| std::fs::read(folder.join(name)).ok())
            }
        }
    }

    /// Builds the model, and says for how many positions.
    pub(crate) fn build(&self, how: &Build) -> Result<(Box<dyn Model>, usize)> {
        match self {
            Self::Gguf(file) => quantized(file, &Config::from_gguf(file.content())?, how),
            Self::Cache(cache) => {
                let entry = cache.report().entry;
                shared(cache, how).with_context(|| format!("entry {entry}"))
            }
            Self::Safetensors { folder, files } => {
                let path = folder.join("config.json");
                let config = std::fs::read(&path).with_context(|| path.display().to_string())?;
                let mut tensors = std::collections::HashMap::new();
                for file in files {
                    let more = safetensors::load(file, how.device);
                    tensors.extend(more.with_context(|| file.display().to_string())?);
                }
                let weights = VarBuilder::from_tensors(tensors, how.dtype, how.device);
                dense(weights, &config, how)
            }
        }
    }
}

/// The model of a cache's entry: quantized where any of its tensors is.
fn shared(cache: &IpcCache, how: &Build) -> Result<(Box<dyn Model>, usize)> {
    if let Some(header) = gguf_header(cache)? {
        return quantized(&cache.quantized(), &Config::from_gguf(&header)?, how);
    }
    let tensors = &cache.manifest().tensors;
    let Some(config) = cache.file("config.json") else {
        let one = tensors.first().map_or("", |tensor| &tensor.name);
        bail!(
            "neither a GGUF header nor a config.json came with its {} tensors (the first is `{one}`), so nothing says \
             that it is a Llama: load a Llama's folder or its .gguf file with `candle-cache load`",
            tensors.len()
        )
    };
    match tensors.iter().any(|tensor| tensor.element.is_quantized()) {
        true => quantized(&cache.quantized(), &Config::from_json(config)?, how),
        false => dense(cache.var_builder(how.dtype), config, how),
    }
}

fn quantized(
    weights: &dyn Quantized,
    config: &Config,
    how: &Build,
) -> Result<(Box<dyn Model>, usize)> {
    let context = how.context.min(config.context);
    let model = Llama::load(weights, config, context, how.device)?;
    Ok((Box::new(model), context))
}

fn dense(
    weights: VarBuilder<'static>,
    config: &[u8],
    how: &Build,
) -> Result<(Box<dyn Model>, usize)> {
    let model = Dense::load(weights, config, how.context, how.dtype, how.device)?;
    let context = model.context();
    Ok((Box::new(model), context))
}

fn gguf_header(cache: &IpcCache) -> Result<Option<Content>> {
    let header = cache.file("gguf.header");
    let content = header.map(|bytes| Content::read(&mut Cursor::new(bytes)));
    content.transpose().context("the entry's gguf.header")
}

/// The safetensors files of a folder: those that its index names, or its one `model.safetensors`.
fn shards(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join("model.safetensors.index.json");
    if index.is_file() {
        let bytes = std::fs::read(&index)?;
        let json: serde_json::Value =
            serde_json::from_slice(&bytes).with_context(|| index.display().to_string())?;
        let map = json["weight_map"].as_object();
        let map = map.with_context(|| format!("{} has no weight_map", index.display()))?;
        let names: BTreeSet<&str> = map.values().filter_map(|name| name.as_str()).collect();
        return Ok(names.into_iter().map(|name| folder.join(name)).collect());
    }
    let single = folder.join("model.safetensors");
    ensure!(
        single.is_file(),
        "{} holds neither model.safetensors nor model.safetensors.index.json",
        folder.display()
    );
    Ok(vec![single])
}

impl Quantized for QuantizedVarBuilder {
    fn get(&self, name: &str) -> candle_core::Result<Arc<QTensor>> {
        self.get_no_shape(name)
    }

    fn contains(&self, name: &str) -> bool {
        self.contains_key(name)
    }
}

impl Model for Llama {
    fn forward(&mut self, tokens: &Tensor, position: usize) -> candle_core::Result<Tensor> {
        Llama::forward(self, tokens, position)
    }
}

impl Model for Dense {
    fn forward(&mut self, tokens: &Tensor, position: usize) -> candle_core::Result<Tensor> {
        Dense::forward(self, tokens, position)
    }
}
