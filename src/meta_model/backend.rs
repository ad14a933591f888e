//! Tensors that have a shape and nothing else, for one run of a constructor.
//! Each is one zero, broadcast: it costs nothing until somebody makes it contiguous, so that growth is watched.

use std::any::Any;
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Error, Result, Shape, Storage, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use super::table::{Fault, Item, Table};
use super::{Constructor, Limits};
use crate::loader::Renaming;

/// How often growth is looked at, in requests.
const EVERY: usize = 16;
/// Bytes asked for after which growth is looked at in any case.
const STEP: u64 = 32 << 20;

/// What is given beyond what the cache holds.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    /// Other prefixes under which names are looked up.
    pub(crate) fit: Vec<Renaming>,
    /// Every tensor that is asked for is given.
    pub(crate) everything: bool,
    /// These are given.
    pub(crate) given: HashSet<Item>,
    /// This one is said to be there, and given.
    pub(crate) pretended: Option<String>,
}

impl Answers {
    pub(crate) fn everything() -> Self {
        Self {
            everything: true,
            ..Self::default()
        }
    }

    fn gives(&self, fault: &Fault) -> bool {
        self.everything
            || self.pretended.as_deref() == Some(&fault.name)
            || self.given.contains(&fault.item())
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) enum Outcome {
    /// There was a model.
    #[default]
    Done,
    /// There was an error.
    Failed(String),
    /// There was a panic.
    Panicked(String),
    /// A limit was reached.
    Stopped(String),
}

impl Outcome {
    /// Why a list that was made up to here may be incomplete.
    pub(crate) fn incomplete(&self) -> Option<String> {
        match self {
            Self::Done => None,
            Self::Failed(why) => Some(format!(
                "over tensors without values, the constructor ended with: {why}"
            )),
            Self::Panicked(why) => Some(format!(
                "over tensors without values, the constructor panicked: {why}"
            )),
            Self::Stopped(why) => Some(why.clone()),
        }
    }
}

/// What one run showed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Run {
    pub(crate) outcome: Outcome,
    /// Names that were asked for as tensors, each once, in order.
    pub(crate) asked: Vec<String>,
    /// Names that were looked for in vain, each once, in order.
    pub(crate) lookups: Vec<String>,
    /// Each once.
    faults: Vec<Met>,
}

/// A fault, and what came of it.
#[derive(Clone, Debug)]
struct Met {
    fault: Fault,
    /// It was given all the same.
    given: bool,
    /// When it was last asked for, in requests.
    last: usize,
}

impl Run {
    /// What the cache would not have given.
    pub(crate) fn faults(&self) -> Vec<Fault> {
        self.all_faults().cloned().collect()
    }

    pub(crate) fn all_faults(&self) -> impl Iterator<Item = &Fault> {
        self.faults.iter().map(|met| &met.fault)
    }

    /// What was given though the cache would not.
    pub(crate) fn given(&self) -> HashSet<Item> {
        let given = self.faults.iter().filter(|met| met.given);
        given.map(|met| met.fault.item()).collect()
    }

    /// How many were not given.
    pub(crate) fn refused(&self) -> usize {
        self.faults.iter().filter(|met| !met.given).count()
    }

    /// What was last refused.
    pub(crate) fn last_refused(&self) -> Option<&Fault> {
        let refused = self.faults.iter().filter(|met| !met.given);
        refused.max_by_key(|met| met.last).map(|met| &met.fault)
    }
}

/// Runs a constructor once.
pub(crate) fn run(
    table: &Arc<Table>,
    answers: &Answers,
    dtype: DType,
    limits: Limits,
    build: &Constructor<'_>,
) -> Run {
    let inner = Arc::new(Inner {
        table: table.clone(),
        answers: answers.clone(),
        limits,
        before: resident(),
        state: Mutex::default(),
    });
    let backend = Box::new(Backend(inner.clone()));
    // On the CPU whatever the engine's device: what a constructor makes of these is of no use to anybody.
    let vb = VarBuilder::from_backend(backend, dtype, Device::Cpu);
    // What a constructor that panics leaves broken is its own, and the closure is not used after the search.
    let ended = quietly(|| catch_unwind(AssertUnwindSafe(|| build(vb))));
    let mut state = inner.lock();
    let mut run = std::mem::take(&mut state.run);
    run.outcome = match (state.stopped.take(), ended) {
        (Some(why), _) => Outcome::Stopped(why),
        (None, Ok(Ok(()))) => Outcome::Done,
        (None, Ok(Err(e))) => Outcome::Failed(e.to_string()),
        (None, Err(panic)) => Outcome::Panicked(said(&*panic).to_string()),
    };
    run
}

/// What a panic said.
pub(crate) fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("without a word")
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work` without printing what panics on this thread.
///
/// Many constructors unwrap what they load: each refusal would print a panic that means nothing to anybody.
fn quietly<T>(work: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    // A hook cannot be replaced while a thread unwinds.
    if !std::thread::panicking() {
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                if !QUIET.get() {
                    before(info);
                }
            }));
        });
    }
    let before = QUIET.replace(true);
    let result = work();
    QUIET.set(before);
    result
}

struct Inner {
    table: Arc<Table>,
    answers: Answers,
    limits: Limits,
    /// Bytes that this process had in memory before the run.
    before: Option<u64>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    run: Run,
    seen: HashSet<String>,
    looked_for: HashSet<String>,
    known: HashMap<Fault, usize>,
    scalars: Vec<Tensor>,
    requests: usize,
    bytes: u64,
    /// Since growth was last looked at.
    unwatched: (usize, u64),
    stopped: Option<String>,
}

struct Backend(Arc<Inner>);

impl SimpleBackend for Backend {
    fn get(&self, s: Shape, name: &str, _: Init, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.0.get(Some(s.into_dims()), name, dtype, dev)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> Result<Tensor> {
        self.0.get(None, name, dtype, dev)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let Inner { table, answers, .. } = &*self.0;
        if table.find(name, &answers.fit).is_some() || answers.pretended.as_deref() == Some(name) {
            return true;
        }
        let mut state = self.0.lock();
        if state.requests < self.0.limits.requests {
            state.requests += 1;
            if state.looked_for.insert(name.to_string()) {
                state.run.lookups.push(name.to_string());
            }
        }
        false
    }
}

/// Missing tensors up to this many bytes are stood in for, however small those are that are held.
const LARGE: u64 = 64 << 20;

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(
        &self,
        shape: Option<Vec<usize>>,
        name: &str,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let (table, fit) = (&self.table, &self.answers.fit);
        let fault = table.fault(name, shape.as_deref(), dtype, fit);
        let wanted = shape.or_else(|| table.shape(name, fit));
        let faulty = fault.is_some();
        let mut state = self.lock();
        if state.seen.insert(name.to_string()) {
            state.run.asked.push(name.to_string());
        }
        if let Some(fault) = fault {
            let given = wanted.is_some() && self.answers.gives(&fault);
            let error = (!given).then(|| fault.error());
            let last = state.requests;
            match state.known.get(&fault).copied() {
                // A builder that is used after its run has nothing to add to it.
                Some(at) => {
                    if let Some(met) = state.run.faults.get_mut(at) {
                        met.last = last;
                    }
                }
                None => {
                    let at = state.run.faults.len();
                    state.known.insert(fault.clone(), at);
                    state.run.faults.push(Met { fault, given, last });
                }
            }
            if let Some(error) = error {
                self.count(&mut state, 0)?;
                return Err(error);
            }
        }
        let Some(wanted) = wanted else {
            let path = name.to_string();
            return Err(Error::CannotFindTensor { path });
        };
        let count = wanted
            .iter()
            .try_fold(1u64, |n, d| n.checked_mul(*d as u64));
        let count = count.filter(|count| isize::try_from(*count).is_ok());
        let count = count.ok_or_else(|| {
            Error::Msg(format!("tensor `{name}` of shape {wanted:?} is too large"))
        })?;
        let bytes = count.saturating_mul(dtype.size_in_bytes().max(1) as u64);
        // A constructor may make any of them contiguous at once, and then all of its bytes are taken: more than the real
        // run would have, where nothing so large is held.
        if faulty && bytes > self.limits.bytes.min(table.largest().max(LARGE)) {
            let why = format!(
                "tensor `{name}` of shape {wanted:?} is not there, and too large to go on with"
            );
            state.stopped.get_or_insert(why);
        }
        self.count(&mut state, bytes)?;
        let scalars = &mut state.scalars;
        let same = |s: &&Tensor| s.dtype() == dtype && s.device().same_device(device);
        if let Some(scalar) = scalars.iter().find(same) {
            return scalar.broadcast_as(wanted);
        }
        let scalar = zero(dtype, device)?;
        let tensor = scalar.broadcast_as(wanted)?;
        scalars.push(scalar);
        Ok(tensor)
    }

    /// Counts a request, and refuses it where a limit is reached. Once that has happened, all are refused.
    fn count(&self, state: &mut State, bytes: u64) -> Result<()> {
        let Limits {
            bytes: most,
            requests,
            ..
        } = self.limits;
        state.requests += 1;
        state.bytes = state.bytes.saturating_add(bytes);
        state.unwatched.0 += 1;
        state.unwatched.1 = state.unwatched.1.saturating_add(bytes);
        if state.stopped.is_none() && state.requests > requests {
            state.stopped = Some(format!(
                "over tensors without values, the constructor was stopped after {requests} requests"
            ));
        }
        let due = state.unwatched.0 >= EVERY || state.unwatched.1 >= STEP.min(most / 4);
        if state.stopped.is_none() && state.bytes > most && due {
            state.unwatched = (0, 0);
            let grown = self.before.zip(resident());
            let grown = grown.map(|(before, now)| now.saturating_sub(before));
            // Where nobody can tell, every tensor counts.
            let grown = grown.unwrap_or(state.bytes);
            if grown > most {
                state.stopped = Some(format!(
                    "over tensors without values, the constructor was stopped when it had made tensors of more than {most} bytes"
                ));
            }
        }
        match &state.stopped {
            None => Ok(()),
            Some(why) => Err(Error::Msg(why.clone())),
        }
    }
}

/// A scalar.
fn zero(dtype: DType, device: &Device) -> Result<Tensor> {
    // candle makes no zeros of these.
    let storage = match dtype {
        DType::F4 => CpuStorage::F4(vec![0]),
        DType::F6E2M3 => CpuStorage::F6E2M3(vec![0]),
        DType::F6E3M2 => CpuStorage::F6E3M2(vec![0]),
        DType::F8E8M0 => CpuStorage::F8E8M0(vec![0]),
        _ => return Tensor::zeros((), dtype, device),
    };
    let storage = Storage::Cpu(storage);
    let tensor = Tensor::from_storage(storage, (), BackpropOp::none(), false);
    tensor.to_device(device)
}

/// Bytes of this process that are in memory.
fn resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    pages.checked_mul(rustix::param::page_size() as u64)
}
