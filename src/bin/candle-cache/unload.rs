//! `candle-cache unload`: removes an entry. Engines that have it mapped keep it.

use candle_ipc_cache::protocol::Request;
use candle_ipc_cache::slab::DeviceId;
use clap::builder::FalseyValueParser;

use crate::{Global, client, exit};

/// Flags of `unload`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The entry's name
    #[arg(env = "CANDLE_CACHE_NAME")]
    name: String,
    /// Only in this role
    #[arg(long, env = "CANDLE_CACHE_ROLE")]
    role: Option<String>,
    /// Only on this device: host, or a GPU's UUID
    #[arg(long, env = "CANDLE_CACHE_DEVICE")]
    device: Option<DeviceId>,
    /// Although engines hold it, or it is loading
    #[arg(long, env = "CANDLE_CACHE_FORCE", value_parser = FalseyValueParser::new())]
    force: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> u8 {
    let request = Request::Unload {
        name: args.name.clone(),
        role: args.role,
        device: args.device,
        epoch: None,
        force: args.force,
    };
    let result =
        client::connect(global).and_then(|connection| client::ask_done(&connection, &request));
    if let Err(e) = result {
        return e.report(global);
    }
    if global.json {
        println!("{}", serde_json::json!({ "unloaded": args.name }));
    } else {
        println!("unloaded {}", args.name);
    }
    exit::DONE
}
