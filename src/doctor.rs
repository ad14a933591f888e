//! What this machine offers to the cache, what is missing, and what to do about it.
//! Each check tries the very thing that serving needs, where that can be tried.

use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

mod gpu;
mod programs;
mod socket;
mod system;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Nothing to do.
    Ok,
    /// Something cannot be used, or may surprise; the rest serves.
    Warning,
    /// What is there to be used cannot be.
    Wrong,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Check {
    /// What was looked at, in a word or two.
    pub check: String,
    /// How it came out.
    pub state: State,
    /// What was found.
    pub found: String,
    /// What to do, where there is something.
    pub way_out: Option<String>,
    /// The same as `found`, for programs.
    pub facts: Map<String, Value>,
}

impl Check {
    fn new(check: impl Into<String>, state: State, found: impl Into<String>) -> Self {
        Self {
            check: check.into(),
            state,
            found: found.into(),
            way_out: None,
            facts: Map::new(),
        }
    }

    fn ok(check: impl Into<String>, found: impl Into<String>) -> Self {
        Self::new(check, State::Ok, found)
    }

    fn warning(check: impl Into<String>, found: impl Into<String>, way_out: &str) -> Self {
        Self::new(check, State::Warning, found).way_out(way_out)
    }

    fn wrong(check: impl Into<String>, found: impl Into<String>, way_out: &str) -> Self {
        Self::new(check, State::Wrong, found).way_out(way_out)
    }

    /// From an error, whose own words say what to do.
    fn error(check: impl Into<String>, state: State, error: &dyn std::error::Error) -> Self {
        Self::new(check, state, error.to_string())
    }

    fn way_out(mut self, way_out: impl Into<String>) -> Self {
        self.way_out = Some(way_out.into());
        self
    }

    fn fact(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.facts.insert(name.into(), value.into());
        self
    }
}

/// Looks at everything. `socket_dir` is the folder that `--socket-dir` names. Opens each visible GPU for a moment and
/// takes 2 MiB of it; changes nothing. Not to be called from within an asynchronous runtime.
pub fn examine(socket_dir: Option<&Path>) -> Vec<Check> {
    let mut checks = gpu::checks();
    checks.extend(system::checks());
    checks.extend(socket::checks(socket_dir));
    checks
}
