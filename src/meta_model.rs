//! What a model's constructor wants that the cache does not give, found by running it against tensors that have a
//! shape and nothing else. [`IpcCache::build`](crate::IpcCache::build) does so after the real thing has failed.
//!
//! One run that answers everything shows all that is wrong, and more: a constructor that tries one name and then
//! another, or goes on without, is led down its first branch. So what it showed is reduced to what the constructor
//! cannot do without, by runs that are as strict as the cache itself but for a few answers; other branches are tried,
//! and so are the prefixes that fit. What takes the fewest changes is what is said to be wrong.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use candle_core::DType;
use candle_nn::VarBuilder;

use crate::loader::Renaming;

mod backend;
mod table;
#[cfg(test)]
mod tests;

pub(crate) use backend::said;
use backend::{Answers, Outcome, Run};
pub(crate) use table::{Fault, Item, Table};

/// A constructor, whose model is of no interest.
pub(crate) type Constructor<'a> = dyn Fn(VarBuilder<'static>) -> candle_core::Result<()> + 'a;

/// What a search may cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes by which this process may grow in one run. A constructor that asks for fewer cannot exceed it by
    /// making one tensor of each that it asks for.
    pub(crate) bytes: u64,
    /// Requests of one run.
    pub(crate) requests: usize,
    /// Runs.
    pub(crate) runs: usize,
    /// Time after which no further run is begun.
    pub(crate) time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 2 << 30,
            requests: 1 << 20,
            runs: 512,
            time: Duration::from_secs(5),
        }
    }
}

/// Faults up to which other branches than the constructor's first are looked for.
const FEW: usize = 64;
/// Lookups that are tried with the other answer.
const LOOKUPS: usize = 16;

/// What would have to change for the constructor to succeed.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// Prefixes that fit: what a name begins with as it is asked for, and as it is held.
    pub(crate) fit: Vec<Renaming>,
    /// The names that are found by them, in the order of the requests.
    pub(crate) fitted: Vec<String>,
    /// What is wrong beside that, in the order of the requests.
    pub(crate) faults: Vec<Fault>,
    /// All shapes in which a tensor was asked for in vain, where they are several.
    pub(crate) shapes: HashMap<String, Vec<Vec<usize>>>,
    /// Why there may be more.
    pub(crate) incomplete: Option<String>,
    /// Some of the faults may be needless, because there was no time to find out.
    pub(crate) unsure: bool,
}

/// A way to make the constructor succeed.
#[derive(Clone)]
struct Way {
    answers: Answers,
    /// What `answers` gives though the cache would not.
    faults: Vec<Fault>,
    run: Run,
}

impl Way {
    /// Ways that come to the constructor's end are better than those that do not, and then those that change less.
    fn cost(&self) -> (bool, usize) {
        let done = matches!(self.run.outcome, Outcome::Done);
        (!done, self.answers.fit.len() + self.faults.len())
    }
}

/// Runs `build` until it is known what is wrong.
pub(crate) fn trace(
    table: Table,
    dtype: DType,
    limits: Limits,
    build: &Constructor<'_>,
) -> Findings {
    let mut search = Search {
        table: table.into(),
        dtype,
        limits,
        build,
        runs: 0,
        end: Instant::now() + limits.time,
        shapes: HashMap::new(),
        cut: false,
    };
    let way = search.best();
    let mut findings = Findings {
        incomplete: way.run.outcome.incomplete(),
        unsure: search.cut && !way.faults.is_empty(),
        ..Findings::default()
    };
    if !way.answers.fit.is_empty() {
        findings.fitted = search.table.fitted(&way.answers.fit, &way.run.asked);
        findings.fit = way.answers.fit;
    }
    findings.faults = way.faults;
    search.shapes.retain(|_, shapes| shapes.len() > 1);
    findings.shapes = search.shapes;
    findings
}

struct Search<'a> {
    table: std::sync::Arc<Table>,
    dtype: DType,
    limits: Limits,
    build: &'a Constructor<'a>,
    runs: usize,
    end: Instant,
    /// Shapes in which tensors of another shape were asked for, by name.
    shapes: HashMap<String, Vec<Vec<usize>>>,
    /// The limits kept it from an answer.
    cut: bool,
}

impl Search<'_> {
    fn best(&mut self) -> Way {
        let open = self.run(&Answers::everything());
        let faults = open.faults();
        if faults.is_empty() {
            return Way {
                answers: Answers::default(),
                faults,
                run: open,
            };
        }
        let fit = self.table.fit(&faults, &open.asked);
        let mut best: Option<Way> = None;
        if !fit.is_empty() {
            let run = self.run(&Answers {
                fit: fit.clone(),
                ..Answers::everything()
            });
            let way = self.reduced(run, fit.clone(), None);
            // A prefix that leaves as much to be wrong does not fit.
            if way.answers.fit.len() + way.faults.len() < faults.len() {
                best = Some(way);
            }
        }
        if best.is_none() || faults.len() <= FEW {
            let way = self.reduced(open, Vec::new(), None);
            keep_better(&mut best, way);
        }
        for fit in [Vec::new(), fit] {
            let cost = best.as_ref().map_or((true, 0), Way::cost);
            let bound = if cost.0 {
                FEW
            } else {
                cost.1.saturating_sub(1)
            };
            if let Some(way) = self.last_branch(fit, bound.min(FEW)) {
                keep_better(&mut best, way);
            }
        }
        // Set above: one of the two branches ran.
        let mut best = best.unwrap_or_else(|| unreachable!("a way was found"));
        let lookups = std::mem::take(&mut best.run.lookups);
        for name in lookups.into_iter().take(LOOKUPS) {
            if best.cost() <= (false, 1) || self.spent() {
                break;
            }
            let fit = best.answers.fit.clone();
            let run = self.run(&Answers {
                fit: fit.clone(),
                pretended: Some(name.clone()),
                ..Answers::everything()
            });
            let way = self.reduced(run, fit, Some(name));
            if way.cost() < best.cost() {
                best = way;
            }
        }
        best
    }

    /// The faults of a run that answered everything, without those that the constructor can do without.
    fn reduced(&mut self, open: Run, fit: Vec<Renaming>, pretended: Option<String>) -> Way {
        let faults = open.faults();
        let items = faults.iter().map(Fault::item).collect();
        let mut way = Way {
            answers: Answers {
                fit,
                pretended,
                given: items,
                everything: false,
            },
            faults,
            run: open,
        };
        let mut classes: Vec<(String, Vec<Item>)> = Vec::new();
        // What nobody knows a shape for was not given, and cannot be taken away.
        let given = way.run.given();
        for fault in way.faults.iter().filter(|f| given.contains(&f.item())) {
            let class = fault.class();
            match classes.iter_mut().find(|(known, _)| *known == class) {
                Some((_, items)) => items.push(fault.item()),
                None => classes.push((class, vec![fault.item()])),
            }
        }
        for (_, items) in classes {
            if self.spent() {
                break;
            }
            let pretended = way.answers.pretended.as_deref();
            if pretended.is_some_and(|name| items.iter().any(|item| item.name == name)) {
                continue;
            }
            let all: HashSet<Item> = items.iter().cloned().collect();
            let Err(refused) = self.without(&mut way, &all) else {
                continue;
            };
            // One refusal, and the constructor gave up: it does so on the others too.
            if items.len() == 1 || refused == 1 {
                continue;
            }
            for item in items {
                if self.spent() {
                    break;
                }
                let _ = self.without(&mut way, &HashSet::from([item]));
            }
        }
        way
    }

    /// Takes answers away where the constructor comes as far without them; else says how many requests it had
    /// refused when it ended.
    fn without(&mut self, way: &mut Way, items: &HashSet<Item>) -> Result<(), usize> {
        let mut answers = way.answers.clone();
        answers.given.retain(|item| !items.contains(item));
        let run = self.run(&answers);
        if run.outcome != way.run.outcome {
            return Err(run.refused());
        }
        way.faults.retain(|fault| !items.contains(&fault.item()));
        way.answers = answers;
        way.run = run;
        Ok(())
    }

    /// Gives, again and again, what was refused last, until the constructor succeeds: where it tries one thing after
    /// another, that is its last resort. At most `most` answers.
    fn last_branch(&mut self, fit: Vec<Renaming>, most: usize) -> Option<Way> {
        let mut way = Way {
            answers: Answers {
                fit,
                ..Answers::default()
            },
            faults: Vec::new(),
            run: Run::default(),
        };
        while !self.spent() {
            way.run = self.run(&way.answers);
            if matches!(way.run.outcome, Outcome::Done) {
                return Some(way);
            }
            let last = way.run.last_refused().cloned()?;
            if way.faults.len() + way.answers.fit.len() >= most {
                return None;
            }
            // A request that cannot be answered at all comes back.
            if !way.answers.given.insert(last.item()) {
                return None;
            }
            way.faults.push(last);
        }
        None
    }

    fn run(&mut self, answers: &Answers) -> Run {
        self.runs += 1;
        let run = backend::run(&self.table, answers, self.dtype, self.limits, self.build);
        for fault in run.all_faults() {
            if let (Some(_), Some(shape)) = (&fault.held, &fault.shape) {
                let shapes = self.shapes.entry(fault.name.clone()).or_default();
                if !shapes.contains(shape) {
                    shapes.push(shape.clone());
                }
            }
        }
        run
    }

    fn spent(&mut self) -> bool {
        self.cut |= self.runs >= self.limits.runs || Instant::now() >= self.end;
        self.cut
    }
}

fn keep_better(best: &mut Option<Way>, way: Way) {
    if best.as_ref().is_none_or(|best| way.cost() < best.cost()) {
        *best = Some(way);
    }
}
