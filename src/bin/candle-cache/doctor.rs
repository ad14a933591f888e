//! `candle-cache doctor`: what is wrong on this machine, and what to do about it.

use candle_ipc_cache::doctor::{self, Check, State};
use serde_json::json;

use crate::{Global, exit};

/// Flags of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args, global: &Global) -> u8 {
    let mut checks = doctor::examine(global.socket_dir.as_deref());
    let count = |state| checks.iter().filter(|check| check.state == state).count();
    let (wrong, warnings) = (count(State::Wrong), count(State::Warning));
    if global.json {
        let report = json!({
            "ok": wrong == 0,
            "wrong": wrong,
            "warnings": warnings,
            "checks": checks,
        });
        println!("{report}");
    } else {
        // What matters stands where the eye is: at the end.
        checks.sort_by_key(|check| check.state);
        let width = checks.iter().map(|check| check.check.len()).max();
        for check in &checks {
            print(check, width.unwrap_or(0));
        }
        println!("{}", sum(wrong, warnings));
    }
    if wrong == 0 { exit::DONE } else { exit::FAILED }
}

fn print(check: &Check, width: usize) {
    let state = match check.state {
        State::Ok => "ok",
        State::Warning => "warning",
        State::Wrong => "WRONG",
    };
    println!("{state:7}  {:width$}  {}", check.check, check.found);
    if let Some(way_out) = &check.way_out {
        println!("{:7}  {:width$}  -> {way_out}", "", "");
    }
}

fn sum(wrong: usize, warnings: usize) -> String {
    let warnings = match warnings {
        0 => "no warnings".to_string(),
        1 => "1 warning".to_string(),
        n => format!("{n} warnings"),
    };
    match wrong {
        0 => format!("nothing is wrong, {warnings}"),
        1 => format!("1 thing is wrong, {warnings}"),
        n => format!("{n} things are wrong, {warnings}"),
    }
}
