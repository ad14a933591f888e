//! The command line: serve, load, plan, status, unload, stop, doctor.
//! Every flag is an environment variable too; exit codes stand in [`exit`].

// A program's items reach nobody else: `pub` says here what the commands share.
#![allow(unreachable_pub)]

use std::path::PathBuf;
use std::process::ExitCode;

use candle_ipc_cache::socket::folder::NOBODY;
use clap::builder::FalseyValueParser;
use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

/// As std's, but a reader that has gone is no reason to panic: what it did not want is not written.
macro_rules! print {
    ($($arg:tt)*) => { $crate::write_out(format_args!($($arg)*)) };
}

/// As std's, with the same difference.
macro_rules! println {
    ($($arg:tt)*) => { $crate::write_out(format_args!("{}\n", format_args!($($arg)*))) };
}

mod client;
mod device;
mod doctor;
mod load;
mod plan;
mod quantize;
mod serve;
mod shard;
mod status;
mod stop;
mod unload;

/// What the program's exit codes mean.
pub mod exit {
    /// Done, as asked.
    pub const DONE: u8 = 0;
    /// The command line is wrong.
    pub const USAGE: u8 = 2;
    /// No daemon could be reached.
    pub const NO_DAEMON: u8 = 3;
    /// The daemon refused.
    pub const REFUSED: u8 = 4;
    /// It was tried, and failed.
    pub const FAILED: u8 = 5;
}

/// Load a model's weights once; every candle process on this machine attaches to them in milliseconds.
#[derive(Debug, Parser)]
#[command(name = "candle-cache", bin_name = "candle-cache", version)]
#[command(
    after_help = "Exit codes: 0 done, 2 usage, 3 no daemon, 4 refused, 5 failed.\n\
    Log: CANDLE_CACHE_LOG (for instance `debug`, or `candle_ipc_cache=trace`)."
)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// Flags that every command takes.
#[derive(Debug, clap::Args)]
pub struct Global {
    /// Folder of the daemon's socket [default: $XDG_RUNTIME_DIR/candle-ipc-cache, else candle-ipc-cache-UID in the
    /// folder for temporary files]
    #[arg(
        long,
        global = true,
        value_name = "DIR",
        env = "CANDLE_CACHE_SOCKET_DIR"
    )]
    pub socket_dir: Option<PathBuf>,
    /// Another user to deal with: `serve` lets it connect, the other commands trust a daemon that it runs. May be given
    /// more than once
    #[arg(long, global = true, value_name = "UID", env = "CANDLE_CACHE_ALLOW_UID", value_delimiter = ',',
        value_parser = parse_uid)]
    pub allow_uid: Vec<u32>,
    /// Print JSON
    #[arg(long, global = true, env = "CANDLE_CACHE_JSON", value_parser = FalseyValueParser::new())]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon
    Serve(serve::Args),
    /// Load a model and hand it to the daemon
    Load(load::Args),
    /// Say what a load would make of each tensor, without loading
    Plan(plan::Args),
    /// Show what the daemon holds
    Status(status::Args),
    /// Remove an entry
    Unload(unload::Args),
    /// Stop the daemon
    Stop(stop::Args),
    /// Say what is wrong on this machine, and what to do about it
    Doctor(doctor::Args),
}

fn write_out(text: std::fmt::Arguments<'_>) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    let _ = out.write_fmt(text).and_then(|()| out.flush());
}

fn parse_uid(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(NOBODY) => Err(format!(
            "uid {NOBODY} stands for every user without a number here, and is never allowed"
        )),
        Ok(uid) => Ok(uid),
        Err(e) => Err(format!("no user number: {e}")),
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let level = if matches!(cli.command, Command::Serve(_)) {
        "info"
    } else {
        "warn"
    };
    let filter =
        EnvFilter::try_from_env("CANDLE_CACHE_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        .init();
    let code = match cli.command {
        Command::Serve(args) => serve::run(args, &cli.global),
        Command::Load(args) => load::run(args, &cli.global),
        Command::Plan(args) => plan::run(args, &cli.global),
        Command::Status(args) => status::run(args, &cli.global),
        Command::Unload(args) => unload::run(args, &cli.global),
        Command::Stop(args) => stop::run(args, &cli.global),
        Command::Doctor(args) => doctor::run(args, &cli.global),
    };
    ExitCode::from(code)
}
