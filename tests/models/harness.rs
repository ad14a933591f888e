//! One model on a tiny config: its variables made with `VarMap`, saved, and run from the file and from the cache.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_ipc_cache::IpcCache;
use candle_ipc_cache::checkpoint::{self, Checkpoint};
use candle_ipc_cache::protocol::EpochId;
use candle_ipc_cache::tensors::{self, cuda::sweep};
use candle_ipc_cache::worker::{LoadOptions, fill};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::copies::{self, Copies};
use crate::stand_in::{Entry, StandIn};

/// A built model, ready to run. A second call is a second forward pass: from the start, or on from the first.
pub(crate) type Forward = Box<dyn FnMut() -> Result<Vec<Tensor>>>;

/// Makes a model from weights, with its config and the inputs of its forward pass.
pub(crate) type Build = fn(VarBuilder<'static>) -> Result<Forward>;

/// Weights by name.
pub(crate) type Weights = BTreeMap<String, Tensor>;

/// A model and its tiny config.
pub(crate) struct Case {
    /// Module and model, as in candle-transformers: `bert::BertForMaskedLM`, or `llama` where there is one.
    pub(crate) name: &'static str,
    pub(crate) build: Build,
    /// Whether it runs in BF16 on the CPU.
    bf16: bool,
    /// Whether a second forward pass goes on from the first.
    growing: bool,
    /// Variables that `VarMap` cannot make, because the model asks for them without their shape.
    by_hand: &'static [(&'static str, &'static [usize])],
    /// Tells the names that are not there, of those that the model asks for and can do without.
    lacks: fn(&str) -> bool,
    /// How copies are looked for, if they are.
    census: Option<fn(Build, &Weights) -> Result<Copies>>,
}

impl Case {
    /// A model that runs in F32 and in BF16.
    pub(crate) fn new(name: &'static str, build: Build) -> Self {
        Self {
            name,
            build,
            bf16: true,
            growing: false,
            by_hand: &[],
            lacks: |_| false,
            census: Some(copies::of_each),
        }
    }

    /// A model that candle does not run in BF16 on the CPU. That it does not is tested.
    pub(crate) fn f32_only(name: &'static str, build: Build) -> Self {
        Self {
            bf16: false,
            ..Self::new(name, build)
        }
    }

    /// A model whose second forward pass goes on from its first, because it has no means to forget.
    pub(crate) fn growing(self) -> Self {
        Self {
            growing: true,
            ..self
        }
    }

    /// With variables by hand: names and shapes.
    pub(crate) fn by_hand(self, by_hand: &'static [(&'static str, &'static [usize])]) -> Self {
        Self { by_hand, ..self }
    }

    /// Without the names that `lacks` tells.
    pub(crate) fn lacking(self, lacks: fn(&str) -> bool) -> Self {
        Self { lacks, ..self }
    }

    /// With copies looked for in groups of weights, because forward passes are slow: the model has presets only, or
    /// its images are large.
    pub(crate) fn grouped(self) -> Self {
        Self {
            census: Some(copies::of_groups),
            ..self
        }
    }

    /// Without looking for copies, because a forward pass takes a second.
    pub(crate) fn slow(self) -> Self {
        Self {
            census: None,
            ..self
        }
    }
}

/// A forward pass with one output.
pub(crate) fn forward(
    mut pass: impl FnMut() -> candle_core::Result<Tensor> + 'static,
) -> Result<Forward> {
    Ok(Box::new(move || Ok(vec![pass()?])))
}

/// Token ids of shape (1, `n`), all below `vocabulary`.
pub(crate) fn ids(n: usize, vocabulary: u32, device: &Device) -> candle_core::Result<Tensor> {
    let ids: Vec<u32> = (0..n as u32).map(|i| (i * 7 + 3) % vocabulary).collect();
    Tensor::from_vec(ids, (1, n), device)
}

/// Values between -1 and 1 that are the same each time, for inputs that are not ids.
pub(crate) fn noise(shape: impl Into<Shape>, vb: &VarBuilder<'_>) -> candle_core::Result<Tensor> {
    let shape = shape.into();
    let mut rng = StdRng::seed_from_u64(shape.elem_count() as u64);
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| rng.random_range(-1f32..1.))
        .collect();
    Tensor::from_vec(values, shape, vb.device())?.to_dtype(vb.dtype())
}

/// What a case showed.
pub(crate) struct Row {
    pub(crate) name: &'static str,
    /// A second forward pass is no repetition of the first: what the first let go of is not told.
    pub(crate) growing: bool,
    /// Tensors in the file.
    pub(crate) tensors: usize,
    /// Their bytes in F32.
    pub(crate) bytes: usize,
    /// Dtypes in which the outputs were equal.
    pub(crate) dtypes: Vec<DType>,
    /// Dtypes in which candle does not run it here, and why.
    pub(crate) refused: Vec<(DType, String)>,
    /// Names that the constructor asked for more than once.
    pub(crate) asked_twice: Vec<String>,
    /// Requests for tensors that the constructor made.
    pub(crate) requests: usize,
    /// What the model copies of its weights and keeps; on the host only.
    pub(crate) copies: Option<Copies>,
    /// Tensors over shared memory that are alive after the constructor and after the first forward pass; on a GPU only.
    pub(crate) alive: Option<(usize, usize)>,
}

/// Runs a case on `device`.
pub(crate) fn run(case: &Case, device: &Device) -> Result<Row> {
    let folder = tempfile::tempdir()?;
    let weights = make(case).context("made with VarMap")?;
    let mut row = Row {
        name: case.name,
        growing: case.growing,
        tensors: weights.len(),
        bytes: weights.values().map(|t| t.elem_count() * 4).sum(),
        dtypes: Vec::new(),
        refused: Vec::new(),
        asked_twice: Vec::new(),
        requests: 0,
        copies: None,
        alive: None,
    };
    for dtype in [DType::F32, DType::BF16] {
        let file = folder.path().join(format!("{dtype:?}.safetensors"));
        candle_core::safetensors::save(&in_dtype(&weights, dtype)?.into_iter().collect(), &file)?;
        let wanted = outcome(|| {
            let outputs = original(case, &file, dtype, device)?;
            check_values(&outputs)?;
            Ok(outputs)
        });
        let bf16_here = case.bf16 || !device.is_cpu();
        let wanted = match wanted {
            Ok(_) if dtype == DType::BF16 && !bf16_here => {
                bail!("runs in BF16, though it is marked F32 only")
            }
            Ok(wanted) => wanted,
            // On a GPU candle lacks kernels for some models.
            Err(why) if !device.is_cpu() || dtype == DType::BF16 && !case.bf16 => {
                row.refused.push((dtype, why));
                continue;
            }
            Err(why) => bail!("the original in {dtype:?}: {why}"),
        };
        let cached = from_cache(case, &file, dtype, device)
            .with_context(|| format!("from the cache in {dtype:?}"))?;
        ensure!(
            bits(&cached.outputs)? == bits(&wanted)?,
            "in {dtype:?} the outputs differ"
        );
        row.dtypes.push(dtype);
        if dtype == DType::F32 {
            row.requests = cached.requests.values().sum();
            let twice = cached.requests.into_iter().filter(|(_, n)| *n > 1);
            row.asked_twice = twice.map(|(name, _)| name).collect();
            row.alive = cached.alive;
        }
    }
    if let Some(census) = case.census.filter(|_| device.is_cpu()) {
        row.copies = Some(census(case.build, &weights)?);
    }
    Ok(row)
}

/// The result of `work`, the message of an error or a panic without candle's backtrace.
pub(crate) fn outcome<T>(work: impl FnOnce() -> Result<T>) -> Result<T, String> {
    let message = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => format!("{e:#}"),
        Err(panic) => match panic.downcast::<String>() {
            Ok(text) => *text,
            Err(panic) => panic
                .downcast_ref::<&str>()
                .map_or_else(|| "a panic".into(), |text| (*text).into()),
        },
    };
    let backtrace = message.find("\n   0: ").unwrap_or(message.len());
    Err(message[..backtrace].trim_end().into())
}

/// The model's variables as `VarMap` makes them, with values that are the same each time.
fn make(case: &Case) -> Result<Weights> {
    let map = VarMap::new();
    let maker = Maker {
        map: map.clone(),
        by_hand: case.by_hand,
        lacks: case.lacks,
    };
    let vb = VarBuilder::from_backend(Box::new(maker), DType::F32, Device::Cpu);
    drop((case.build)(vb)?);
    let data = map.data().lock().unwrap();
    data.iter()
        .map(|(name, var)| Ok((name.clone(), values(name, var)?)))
        .collect()
}

/// candle's `VarMap`, with the variables by hand and without those that are not there.
struct Maker {
    map: VarMap,
    by_hand: &'static [(&'static str, &'static [usize])],
    lacks: fn(&str) -> bool,
}

impl SimpleBackend for Maker {
    fn get(
        &self,
        s: Shape,
        name: &str,
        h: Init,
        dtype: DType,
        dev: &Device,
    ) -> candle_core::Result<Tensor> {
        if (self.lacks)(name) {
            let path = name.into();
            return Err(candle_core::Error::CannotFindTensor { path });
        }
        SimpleBackend::get(&self.map, s, name, h, dtype, dev)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> candle_core::Result<Tensor> {
        let Some((_, shape)) = self.by_hand.iter().find(|(n, _)| *n == name) else {
            candle_core::bail!("`{name}` has no shape: it is not among the variables by hand");
        };
        SimpleBackend::get(
            &self.map,
            (*shape).into(),
            name,
            Init::default(),
            dtype,
            dev,
        )
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.by_hand.iter().any(|(n, _)| *n == name)
    }
}

/// Small values around the constant that candle initializes the variable with, or around zero.
fn values(name: &str, var: &Var) -> Result<Tensor> {
    if !var.dtype().is_float() {
        return Ok(var.as_tensor().copy()?);
    }
    let seed = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, b| {
        (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut rng = StdRng::seed_from_u64(seed);
    let initial: Vec<f32> = var.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    let centre = match initial.first() {
        Some(first) if *first > 0. && initial.len() > 1 && initial.iter().all(|v| v == first) => {
            *first
        }
        _ => 0.,
    };
    let values: Vec<f32> = initial
        .iter()
        .map(|_| centre + rng.random_range(-0.25f32..0.25))
        .collect();
    Ok(Tensor::from_vec(values, var.shape(), &Device::Cpu)?.to_dtype(var.dtype())?)
}

fn in_dtype(weights: &Weights, dtype: DType) -> Result<Weights> {
    let convert = |(name, tensor): (&String, &Tensor)| {
        let tensor = if tensor.dtype().is_float() {
            tensor.to_dtype(dtype)?
        } else {
            tensor.clone()
        };
        Ok((name.clone(), tensor))
    };
    weights.iter().map(convert).collect()
}

/// The outputs of the model as candle builds it from a file.
fn original(case: &Case, file: &Path, dtype: DType, device: &Device) -> Result<Vec<Tensor>> {
    let bytes = std::fs::read(file)?;
    (case.build)(VarBuilder::from_buffered_safetensors(bytes, dtype, device)?)?()
}

/// A run of a model that was built from the cache.
struct Cached {
    outputs: Vec<Tensor>,
    /// How often the constructor asked for each name.
    requests: BTreeMap<String, usize>,
    alive: Option<(usize, usize)>,
}

/// Loads the file as the worker does, attaches to it, and runs the model.
fn from_cache(case: &Case, file: &Path, dtype: DType, device: &Device) -> Result<Cached> {
    let options = LoadOptions {
        name: Some("m".into()),
        device: tensors::device_id(device)?,
        ..LoadOptions::default()
    };
    let checkpoint = Checkpoint::open(file, &checkpoint::Options::default())?;
    let loaded = fill(&checkpoint, &options, &|_| {})?;
    let daemon = StandIn::serving(Entry {
        epoch: EpochId([7; 16]),
        manifest: loaded.manifest,
        manifest_fd: loaded.manifest_fd,
        slabs: loaded.export.slabs,
    });
    let cache = IpcCache::attach(&daemon.config("m").checkpoint(file), device)?;
    let requests = Requests::default();
    let mut forward = rebuild(&cache, dtype, case.build, &requests)?;
    drop(cache);
    let built = sweep().tensors;
    // An output of a model that fuses batch norms, whose statistics are variables to candle, refers to all that it was
    // computed from: the weights stay mapped while it lives.
    let outputs = forward()?.iter().map(Tensor::detach).collect();
    let ran = sweep().tensors;
    drop(forward);
    ensure!(
        sweep().tensors == 0,
        "something still reads shared memory after the model is gone"
    );
    let requests = std::mem::take(&mut *requests.lock().unwrap());
    Ok(Cached {
        outputs,
        requests,
        alive: (!device.is_cpu()).then_some((built, ran)),
    })
}

/// The one place that says how an engine builds a model from the cache.
fn rebuild(cache: &IpcCache, dtype: DType, build: Build, requests: &Requests) -> Result<Forward> {
    let build = |vb| {
        let model = build(counting(vb, requests));
        model.map_err(|e| candle_core::Error::Msg(format!("{e:#}")))
    };
    Ok(cache.build(dtype, build)?)
}

/// How often each name was asked for.
type Requests = Arc<Mutex<BTreeMap<String, usize>>>;

fn counting(inner: VarBuilder<'static>, requests: &Requests) -> VarBuilder<'static> {
    let (dtype, device) = (inner.dtype(), inner.device().clone());
    let requests = requests.clone();
    let counting = Counting { inner, requests };
    VarBuilder::from_backend(Box::new(counting), dtype, device)
}

/// Passes requests on, and counts them.
struct Counting {
    inner: VarBuilder<'static>,
    requests: Requests,
}

impl Counting {
    fn count(&self, name: &str) {
        let mut requests = self.requests.lock().unwrap();
        *requests.entry(name.into()).or_default() += 1;
    }
}

impl SimpleBackend for Counting {
    fn get(
        &self,
        s: Shape,
        name: &str,
        h: Init,
        dtype: DType,
        dev: &Device,
    ) -> candle_core::Result<Tensor> {
        self.count(name);
        let on = self.inner.clone().set_device(dev.clone());
        on.get_with_hints_dtype(s, name, h, dtype)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> candle_core::Result<Tensor> {
        self.count(name);
        let on = self.inner.clone().set_device(dev.clone());
        on.get_unchecked_dtype(name, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.inner.contains_tensor(name)
    }
}

/// Outputs that are not finite, or all zero, would compare equal whatever the weights.
fn check_values(outputs: &[Tensor]) -> Result<()> {
    ensure!(!outputs.is_empty(), "no outputs");
    for output in outputs {
        let values: Vec<f32> = output
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F32)?
            .flatten_all()?
            .to_vec1()?;
        ensure!(!values.is_empty(), "an output without elements");
        ensure!(
            values.iter().all(|v| v.is_finite()),
            "an output is not finite"
        );
        ensure!(values.iter().any(|v| *v != 0.), "an output is all zero");
    }
    Ok(())
}

/// Dtype, shape and bits of a tensor's elements.
pub(crate) type Bits = (DType, Vec<usize>, Vec<u64>);

/// Outputs in a form that is compared exactly.
pub(crate) fn bits(outputs: &[Tensor]) -> Result<Vec<Bits>> {
    let bits = |output: &Tensor| {
        let flat = output.to_device(&Device::Cpu)?.flatten_all()?;
        macro_rules! each {
            ($t:ty, $bits:expr) => {
                flat.to_vec1::<$t>()?.into_iter().map($bits).collect()
            };
        }
        let values = match flat.dtype() {
            DType::F64 => each!(f64, f64::to_bits),
            DType::F32 => each!(f32, |v| v.to_bits().into()),
            DType::F16 => each!(half::f16, |v| v.to_bits().into()),
            DType::BF16 => each!(half::bf16, |v| v.to_bits().into()),
            DType::U8 => each!(u8, u64::from),
            DType::U32 => each!(u32, u64::from),
            DType::I64 => each!(i64, i64::cast_unsigned),
            other => bail!("an output of {other:?}"),
        };
        Ok((output.dtype(), output.dims().to_vec(), values))
    };
    outputs.iter().map(bits).collect()
}
