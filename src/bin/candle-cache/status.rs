//! `candle-cache status`: what the daemon holds.

use std::path::Path;

use candle_ipc_cache::protocol::{EntryStatus, Progress, Reply, Request, STEP};

use crate::client::{self, ClientError};
use crate::{Global, exit};

/// Flags of `status`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args, global: &Global) -> u8 {
    let connection = match client::connect(global) {
        Ok(connection) => connection,
        Err(e) => return e.report(global),
    };
    let mut entries = Vec::new();
    let mut after = None;
    loop {
        match client::ask(&connection, &Request::Status { after }, STEP) {
            Ok(Reply::Status {
                entries: page,
                more,
            }) => {
                after = page.last().map(|status| status.entry.clone());
                entries.extend(page);
                if !more || after.is_none() {
                    break;
                }
            }
            Ok(other) => return ClientError::Unexpected(format!("{other:?}")).report(global),
            Err(e) => return e.report(global),
        }
    }
    if global.json {
        print_json(connection.path(), &entries);
    } else {
        print_table(connection.path(), &entries);
    }
    exit::DONE
}

fn print_json(socket: &Path, entries: &[EntryStatus]) {
    let entries: Vec<_> = entries
        .iter()
        .map(|status| {
            serde_json::json!({
                "name": status.entry.name,
                "role": status.entry.role,
                "device": status.entry.device.to_string(),
                "shard": status.entry.shard.to_string(),
                "ready": status.ready.as_ref().map(|ready| serde_json::json!({
                    "epoch": ready.epoch.to_string(),
                    "ranks": ready.ranks,
                    "root": ready.root,
                    "dtype": ready.dtype,
                    "recipe": ready.recipe,
                    "tensors": ready.tensors,
                    "memory_bytes": ready.memory_bytes,
                    "leases": ready.leases,
                    "holders": ready.holders,
                    "age_seconds": ready.age_seconds,
                })),
                "loading": status.loading,
                "failed": status.failed,
                "retired_bytes": status.retired_bytes,
            })
        })
        .collect();
    println!(
        "{}",
        serde_json::json!({ "socket": socket, "entries": entries })
    );
}

fn print_table(socket: &Path, entries: &[EntryStatus]) {
    println!("socket {}", socket.display());
    if entries.is_empty() {
        println!("no entries: `candle-cache load MODEL`");
        return;
    }
    let mut rows = vec![
        [
            "NAME", "ROLE", "SHARD", "DEVICE", "STATE", "MEMORY", "TENSORS", "LEASES", "AGE",
        ]
        .map(String::from),
    ];
    rows.extend(entries.iter().map(row));
    let mut widths = [0; 9];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for (i, row) in rows.iter().enumerate() {
        let cells: Vec<String> = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:<width$}"))
            .collect();
        println!("{}", cells.join("  ").trim_end());
        let Some(status) = i.checked_sub(1).and_then(|i| entries.get(i)) else {
            continue;
        };
        if let Some(ready) = &status.ready {
            if ready.recipe != "none" {
                println!("    quantized by {}", ready.recipe);
            }
            if ready.dtype != "stored" {
                println!("    floats stored as {}", ready.dtype);
            }
        }
        if let Some(reason) = &status.failed {
            println!("    last load failed: {}", reason.replace('\n', "\n    "));
        }
        if status.retired_bytes > 0 {
            println!(
                "    {} of epochs that are gone, which engines still hold, or ranks of one that they hold",
                bytes(status.retired_bytes)
            );
        }
    }
}

fn row(status: &EntryStatus) -> [String; 9] {
    let state = match (&status.ready, &status.loading, &status.failed) {
        (Some(_), Some(progress), _) => format!("ready, loading {}", percent(progress)),
        (Some(_), None, _) => "ready".into(),
        (None, Some(progress), _) => format!("{} {}", progress.phase, percent(progress)),
        (None, None, Some(_)) => "failed".into(),
        (None, None, None) => "gone".into(),
    };
    let ready = |show: &dyn Fn(&candle_ipc_cache::protocol::ReadyStatus) -> String| {
        status.ready.as_ref().map_or("-".into(), show)
    };
    [
        status.entry.name.clone(),
        status.entry.role.clone(),
        status.entry.shard.to_string(),
        status.entry.device.to_string(),
        state,
        ready(&|r| bytes(r.memory_bytes)),
        ready(&|r| r.tensors.to_string()),
        ready(&|r| r.leases.to_string()),
        ready(&|r| age(r.age_seconds)),
    ]
}

fn percent(progress: &Progress) -> String {
    // `total` is 0 while a worker does not know yet.
    let share = progress.done.min(progress.total) as f64 / progress.total.max(1) as f64;
    format!("{:.0}%", 100.0 * share)
}

fn bytes(count: u64) -> String {
    match count {
        0..1_048_576 => format!("{:.1} KiB", count as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", count as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", count as f64 / 1_073_741_824.0),
    }
}

fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86400 => format!("{}h{}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{}h", seconds / 86400, seconds % 86400 / 3600),
    }
}
