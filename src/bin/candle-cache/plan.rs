//! `candle-cache plan`: what a load would make of each tensor, from headers alone. Needs no daemon.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use candle_ipc_cache::checkpoint::{self, Checkpoint};
use candle_ipc_cache::key::{ALL, Key};
use candle_ipc_cache::manifest::ElementType;
use candle_ipc_cache::quantize;
use candle_ipc_cache::worker::alias::Aliases;
use candle_ipc_cache::worker::plan::{Placed, Plan};
use candle_ipc_cache::worker::taken::Taken;
use candle_ipc_cache::worker::{LoadOptions, TargetDtype};
use indicatif::BinaryBytes;
use serde_json::json;

use crate::client;
use crate::quantize::QuantizeArgs;
use crate::shard::ShardArgs;
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
    #[command(flatten)]
    shard: ShardArgs,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> u8 {
    match plan(&args, global) {
        Ok(()) => exit::DONE,
        Err(e) => {
            eprintln!("candle-cache: {}", client::told(&e));
            if global.json {
                let error = client::told(&e);
                println!(
                    "{}",
                    json!({ "error": error, "refusal": null, "exit": exit::FAILED })
                );
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
    /// The dimension along which it is cut for its rank.
    cut: Option<usize>,
    why: String,
    /// It stays because its rows are no whole blocks.
    odd: bool,
}

fn plan(args: &Args, global: &Global) -> anyhow::Result<()> {
    let variant = args.variant.clone();
    let checkpoint = Checkpoint::open(&args.model, &checkpoint::Options { variant })?;
    let quantize = args.quantize.read()?;
    let assigned = match &quantize {
        Some(how) => Some(quantize::assign(&checkpoint.tensors, how)?),
        None => None,
    };
    let why: HashMap<&str, (String, bool)> = assigned
        .iter()
        .flatten()
        .zip(&checkpoint.tensors)
        .map(|(assigned, tensor)| {
            let why = match assigned.importance {
                Some(_) => format!("{}, importance matrix", assigned.why),
                None => assigned.why.to_string(),
            };
            let odd = matches!(assigned.why, quantize::Why::Rows { .. });
            (tensor.name.as_str(), (why, odd))
        })
        .collect();
    // All ranks' slices are equal in shape: one stands for them.
    let shard = args.shard.shards()?.first().copied().unwrap_or_default();
    let options = LoadOptions {
        dtype: args.dtype,
        quantize,
        selection: args.shard.selection()?,
        stack_experts: args.shard.stack_experts,
        shard,
        ..LoadOptions::default()
    };
    let taken = Taken::of(&checkpoint, &options)?;
    let layout = Plan::new(&taken, &options, &Aliases::none())?;
    let row = |placed: &Placed| {
        let tensor = &taken.checkpoint().tensors[placed.source];
        let (why, odd) = why.get(tensor.name.as_str()).cloned().unwrap_or_default();
        Row {
            name: &tensor.name,
            shape: &tensor.shape,
            from: tensor.element,
            to: placed.element,
            before: tensor.bytes,
            after: placed.bytes,
            cut: tensor.slice.map(|slice| slice.cut.dim),
            why,
            odd,
        }
    };
    let rows: Vec<Row> = layout.tensors.iter().map(row).collect();
    let key = taken.key(&options);
    if global.json {
        print_json(&rows, &key);
    } else {
        print_table(&rows, &key);
    }
    Ok(())
}

fn print_json(rows: &[Row], key: &Key) {
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
                "cut": r.cut,
                "why": r.why,
            })
        })
        .collect();
    let sum = |bytes: fn(&Row) -> u64| rows.iter().map(bytes).sum::<u64>();
    println!(
        "{}",
        json!({
            "recipe": key.recipe,
            "shard": key.shard.to_string(),
            "selection": key.selection,
            "tensors": tensors,
            "bytes_before": sum(|r| r.before),
            "bytes_after": sum(|r| r.after),
        })
    );
}

fn print_table(rows: &[Row], key: &Key) {
    let width = |text: fn(&Row) -> usize| rows.iter().map(text).max().unwrap_or(0);
    let names = width(|r| r.name.escape_debug().count()).min(72);
    let shapes = width(|r| shape(r).len());
    for r in rows {
        println!(
            "{:names$}  {:shapes$}  {:>7} -> {:7}  {:>10} -> {:>10}  {}",
            r.name.escape_debug().to_string(),
            shape(r),
            r.from,
            r.to,
            BinaryBytes(r.before).to_string(),
            BinaryBytes(r.after).to_string(),
            match r.cut {
                Some(dim) if r.why.is_empty() => format!("slice along dimension {dim}"),
                Some(dim) => format!("slice along dimension {dim}; {}", r.why),
                None => r.why.clone(),
            }
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
        "recipe {}: {} tensors, {} -> {} ({before} -> {after} bytes); tensors of equal bytes will share one place",
        key.recipe,
        rows.len(),
        BinaryBytes(before),
        BinaryBytes(after)
    );
    let odd = rows.iter().filter(|r| r.odd).count();
    if odd > 0 {
        println!(
            "{odd} matrices stay as they are, because their rows are no whole blocks: a recipe can name what to fall back to, \
             after a slash: `.../q8_0` has blocks of 32"
        );
    }
    if !key.shard.is_whole() || key.selection != ALL {
        println!("part {}: {}; ranks are cut alike", key.shard, key.selection);
    }
}

fn shape(row: &Row) -> String {
    let dims: Vec<String> = row.shape.iter().map(u64::to_string).collect();
    format!("[{}]", dims.join(", "))
}
