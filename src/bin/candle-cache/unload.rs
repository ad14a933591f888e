//! `candle-cache unload`: removes an entry. Engines that have it mapped keep it.

use candle_ipc_cache::protocol::Request;
use clap::builder::FalseyValueParser;

use crate::client::{self, ClientError};
use crate::device::DeviceArg;
use crate::{Global, exit};

/// Flags of `unload`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The entry's name
    #[arg(env = "CANDLE_CACHE_NAME")]
    name: String,
    /// Only in this role
    #[arg(long, env = "CANDLE_CACHE_ROLE")]
    role: Option<String>,
    /// Only on this device: host, cuda:N, or a GPU's UUID
    #[arg(long, env = "CANDLE_CACHE_DEVICE")]
    device: Option<DeviceArg>,
    /// Although engines hold it, or it is loading
    #[arg(long, env = "CANDLE_CACHE_FORCE", value_parser = FalseyValueParser::new())]
    force: bool,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> u8 {
    if let Err(e) = unload(&args, global) {
        return e.report(global);
    }
    if global.json {
        println!("{}", serde_json::json!({ "unloaded": args.name }));
    } else {
        println!("unloaded {}", args.name);
    }
    exit::DONE
}

fn unload(args: &Args, global: &Global) -> Result<(), ClientError> {
    let request = Request::Unload {
        name: args.name.clone(),
        role: args.role.clone(),
        device: args.device.map(DeviceArg::identity).transpose()?,
        shard: None,
        epoch: None,
        force: args.force,
    };
    client::ask_done(&client::connect(global)?, &request)
}
