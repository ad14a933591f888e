//! `candle-cache stop`: stops the daemon, and returns when its socket is gone.

use std::time::Duration;

use candle_ipc_cache::protocol::{Reply, Request};
use candle_ipc_cache::socket::{Connection, SocketError};

use crate::client::{self, ClientError};
use crate::{Global, exit};

/// A daemon drains for a second, and kills its workers.
const PATIENCE: Duration = Duration::from_secs(30);

/// Flags of `stop`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args, global: &Global) -> u8 {
    let result = client::connect(global).and_then(|connection| {
        client::ask_done(&connection, &Request::Stop)?;
        wait_for_end(&connection)
    });
    if let Err(e) = result {
        return e.report(global);
    }
    if global.json {
        println!("{}", serde_json::json!({ "stopped": true }));
    } else {
        println!("stopped");
    }
    exit::DONE
}

fn wait_for_end(connection: &Connection) -> Result<(), ClientError> {
    match connection.receive::<Reply>(PATIENCE) {
        Err(SocketError::Closed) => Ok(()),
        Err(e) => Err(e.into()),
        Ok((reply, _)) => Err(ClientError::Unexpected(format!("{reply:?}"))),
    }
}
