//! `candle-cache plan`: what a load would make of each tensor, from headers alone. Needs no daemon.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_ipc_cache::checkpoint::{self, Checkpoint};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::quantize;
use candle_ipc_cache::worker::alias::Aliases;
use candle_ipc_cache::worker::plan::Plan;
use candle_ipc_cache::worker::{LoadOptions, TargetDtype};
use indicatif::BinaryBytes;
use serde_json::json;

use crate::quantize::QuantizeArgs;
use crate::{Global, exit};

/// Prints what a load would make of a model.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Folder, `.safetensors` file, index file, or `.gguf` file
    #[arg(env = "CANDLE_CACHE_MODEL")]
    model: PathBuf,
    /// What float tensors are stored as: `stored` (as they are), `bf16`, `f16` or `f32`
    #[arg(long, env = "CANDLE_CACHE_DTYPE", default_value_t = TargetDtype::Stored)]
    dtype: TargetDtype,
    /// Which variant of the files, for instance `fp16` for `model.fp16.safetensors`
    #[arg(long, env = "CANDLE_CACHE_VARIANT")]
    variant: Option<String>,
    #[command(flatten)]
    quantize: QuantizeArgs,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> u8 {
    match plan(&args, global) {
        Ok(()) => exit::DONE,
        Err(e) => {
            eprintln!("candle-cache: {e:#}");
            if global.json {
                let error = format!("{e:#}");
                println!("{}", json!({ "error": error, "exit": exit::FAILED }));
            }
            exit::FAILED
        }
    }
}

/// One tensor's line.
struct Row<'a> {
    name: &'a str,
    shape: &'a [u64],
    from: ElementType,
    to: ElementType,
    before: u64,
    after: u64,
    why: String,
}

fn plan(args: &Args, global: &Global) -> anyhow::Result<()> {
    let variant = args.variant.clone();
    let checkpoint = Checkpoint::open(&args.model, &checkpoint::Options { variant })?;
    let quantize = args.quantize.read()?;
    let assigned = match &quantize {
        Some(how) => Some(quantize::assign(&checkpoint.tensors, how)?),
        None => None,
    };
    let options = LoadOptions {
        dtype: args.dtype,
        quantize,
        ..LoadOptions::default()
    };
    let layout = Plan::new(&checkpoint, &options, &Aliases::none())?;
    let row = |placed: &candle_ipc_cache::worker::plan::Placed| {
        let tensor = &checkpoint.tensors[placed.source];
        let why = assigned.as_ref().map(|a| {
            let a = &a[placed.source];
            match a.importance {
                Some(_) => format!("{}, importance matrix", a.why),
                None => a.why.to_string(),
            }
        });
        Row {
            name: &tensor.name,
            shape: &tensor.shape,
            from: tensor.element,
            to: placed.element,
            before: tensor.bytes,
            after: placed.bytes,
            why: why.unwrap_or_default(),
        }
    };
    let rows: Vec<Row> = layout.tensors.iter().map(row).collect();
    let recipe = options.key(&checkpoint).recipe;
    if global.json {
        print_json(&rows, &recipe);
    } else {
        print_table(&rows, &recipe);
    }
    Ok(())
}

fn print_json(rows: &[Row], recipe: &str) {
    let tensors: Vec<_> = rows
        .iter()
        .map(|r| {
            json!({
                "name": r.name,
                "shape": r.shape,
                "from": r.from.as_str(),
                "to": r.to.as_str(),
                "bytes_before": r.before,
                "bytes_after": r.after,
                "why": r.why,
            })
        })
        .collect();
    let sum = |bytes: fn(&Row) -> u64| rows.iter().map(bytes).sum::<u64>();
    println!(
        "{}",
        json!({
            "recipe": recipe,
            "tensors": tensors,
            "bytes_before": sum(|r| r.before),
            "bytes_after": sum(|r| r.after),
        })
    );
}

fn print_table(rows: &[Row], recipe: &str) {
    let width = |text: fn(&Row) -> usize| rows.iter().map(text).max().unwrap_or(0);
    let names = width(|r| r.name.len()).min(72);
    let shapes = width(|r| shape(r).len());
    for r in rows {
        println!(
            "{:names$}  {:shapes$}  {:>7} -> {:7}  {:>10} -> {:>10}  {}",
            r.name,
            shape(r),
            r.from,
            r.to,
            BinaryBytes(r.before).to_string(),
            BinaryBytes(r.after).to_string(),
            r.why
        );
    }
    let mut types: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for r in rows {
        let (count, bytes) = types.entry(r.to.as_str()).or_default();
        *count += 1;
        *bytes += r.after;
    }
    println!("");
    for (name, (count, bytes)) in types {
        println!(
            "{name:8} {count:>6} tensors  {:>10}",
            BinaryBytes(bytes).to_string()
        );
    }
    let (before, after): (u64, u64) = (
        rows.iter().map(|r| r.before).sum(),
        rows.iter().map(|r| r.after).sum(),
    );
    println!(
        "recipe {recipe}: {} tensors, {} -> {} ({before} -> {after} bytes), second names not yet looked for",
        rows.len(),
        BinaryBytes(before),
        BinaryBytes(after)
    );
}

fn shape(row: &Row) -> String {
    let dims: Vec<String> = row.shape.iter().map(u64::to_string).collect();
    format!("[{}]", dims.join(", "))
}
