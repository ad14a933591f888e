//! The flags that say which part of a model to take, shared by the commands that take them.

use std::path::PathBuf;

use candle_ipc_cache::protocol::MAX_RANKS as MAX_SET;
use candle_ipc_cache::shard::{MAX_RANKS, Part, ShardId};
use candle_ipc_cache::trace::Trace;
use candle_ipc_cache::worker::select::{Selection, ShardPlan};
use clap::builder::{FalseyValueParser, RangedU64ValueParser};

/// Which part of the model to take.
#[derive(clap::Args, Debug, Default)]
pub struct ShardArgs {
    /// Take only the tensors that this trace asked for
    #[arg(long, value_name = "TRACE", env = "CANDLE_CACHE_ONLY")]
    pub only: Option<PathBuf>,
    /// Take only tensors whose names fit this pattern (`*` any characters, `?` one), for instance a pipeline stage's layers.
    /// May be given more than once
    #[arg(
        long,
        value_name = "PATTERN",
        env = "CANDLE_CACHE_KEEP",
        value_delimiter = ','
    )]
    pub keep: Vec<String>,
    /// Cut the tensors among this many tensor-parallel ranks, as --plan says
    #[arg(long, value_name = "SIZE", env = "CANDLE_CACHE_TP", requires = "plan",
        value_parser = RangedU64ValueParser::<u16>::new().range(1..=MAX_RANKS as u64))]
    pub tp: Option<u16>,
    /// Take this rank's slices alone [default: all ranks, published together as one set]
    #[arg(
        long,
        value_name = "RANK",
        env = "CANDLE_CACHE_TP_RANK",
        requires = "tp"
    )]
    pub tp_rank: Option<u16>,
    /// How tensors are cut: a `.toml` file of rules (under `[rules]`, `"*.q_proj" = 0` for slices along dimension 0,
    /// `"*norm*" = "replicate"` for all of it; what no rule names is whole; `keep = [...]` as --keep), or a trace, whose
    /// shards say it
    #[arg(long, value_name = "PLAN", env = "CANDLE_CACHE_PLAN")]
    pub plan: Option<PathBuf>,
    /// Store the experts of each layer one behind the other: `experts.N.w` are then slices of one tensor `experts.w`, whose
    /// first dimension is the expert
    #[arg(long, env = "CANDLE_CACHE_STACK_EXPERTS", value_parser = FalseyValueParser::new())]
    pub stack_experts: bool,
    /// Name the entry as this pipeline stage, for instance `0/4`; --keep, --only or the plan says what it holds
    #[arg(long, value_name = "RANK/SIZE", env = "CANDLE_CACHE_PP")]
    pub pp: Option<Part>,
    /// Name the entry as this data-parallel replica, for instance `0/2`
    #[arg(long, value_name = "RANK/SIZE", env = "CANDLE_CACHE_DP")]
    pub dp: Option<Part>,
    /// Name the entry as this expert-parallel rank, for instance `0/8`; --keep, --only or the plan says what it holds
    #[arg(long, value_name = "RANK/SIZE", env = "CANDLE_CACHE_EP")]
    pub ep: Option<Part>,
}

impl ShardArgs {
    /// Reads the plan and the trace.
    pub fn selection(&self) -> anyhow::Result<Selection> {
        let mut selection = Selection::default().keep(self.keep.iter().cloned());
        if let Some(path) = &self.only {
            let shown = path.display().to_string();
            selection = selection.only(&Trace::read(path)?, shown)?;
        }
        // One rank has all of everything: a script that is run with `--tp 1` needs no other words.
        let plan = self.plan.as_ref().filter(|_| self.tp != Some(1));
        if let Some(path) = plan {
            selection = selection.plan(ShardPlan::read(path)?);
        }
        for (flag, part) in [("--pp", self.pp), ("--ep", self.ep)] {
            let part = part.unwrap_or_default();
            anyhow::ensure!(
                part.is_whole() || selection.filters(),
                "{flag} {part} says which part the entry is, and nothing says what is in it: give --keep, --only, or a \
                 --plan with `keep`"
            );
        }
        Ok(selection)
    }

    /// The parts to load: one, or all tensor-parallel ranks.
    pub fn shards(&self) -> anyhow::Result<Vec<ShardId>> {
        let shard = ShardId {
            tp: Part::default(),
            pp: self.pp.unwrap_or_default(),
            dp: self.dp.unwrap_or_default(),
            ep: self.ep.unwrap_or_default(),
        };
        let size = self.tp.unwrap_or(1);
        let ranks = match self.tp_rank {
            Some(rank) => {
                anyhow::ensure!(
                    rank < size,
                    "--tp-rank {rank}: ranks of --tp {size} run from 0 to {}",
                    size - 1
                );
                rank..rank + 1
            }
            None => 0..size,
        };
        anyhow::ensure!(
            ranks.len() <= MAX_SET,
            "--tp {size}: at most {MAX_SET} ranks are one set; load them one by one, with --tp-rank"
        );
        let of = |rank| ShardId {
            tp: Part::new(rank, size),
            ..shard
        };
        Ok(ranks.map(of).collect())
    }
}
