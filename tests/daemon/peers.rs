//! Bad peers: each is answered or dropped within its deadline, while good engines attach all the time.

use std::io::Read;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use candle_ipc_cache::protocol::{self, MAX_PACKET, Refusal, Reply, Request, VERSION};
use candle_ipc_cache::socket::{
    Connection, Received, SocketError, raise_descriptor_limit, receive_now, send_now,
};
use rustix::event::{PollFd, PollFlags, poll};

use crate::children;
use crate::support::{
    Daemon, PATIENCE, Weights, ask, attach, attach_request, eventually, quick, refusal,
};

/// Does something bad while good engines attach, and waits until twenty of them have, too.
fn amid_good_attaches(daemon: &Daemon, bad: impl FnOnce()) {
    daemon.publish("good", 1);
    let (over, count) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                attach(&daemon.socket, "good").unwrap();
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        // Also when `bad` panics, or the scope would never end.
        let end = OnDrop(&over);
        bad();
        let before = count.load(Ordering::Relaxed);
        eventually("twenty more attaches", || {
            count.load(Ordering::Relaxed) >= before + 20
        });
        drop(end);
    });
    eventually("no leases", || daemon.leases("good") == 0);
}

struct OnDrop<'a>(&'a AtomicBool);

impl Drop for OnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The next packet as it is; `None` at the end.
fn raw(connection: &Connection) -> Option<Vec<u8>> {
    poll(&mut [PollFd::new(connection, PollFlags::IN)], None).unwrap();
    match receive_now(connection.as_fd()).unwrap() {
        Received::Packet(packet, _) => Some(packet),
        Received::Closed => None,
        Received::Nothing => panic!("poll said that there is something"),
    }
}

fn is_closed(connection: &Connection) -> bool {
    matches!(
        connection.receive::<Reply>(PATIENCE),
        Err(SocketError::Closed)
    )
}

#[test]
fn garbage_is_dropped_without_a_word() {
    let daemon = Daemon::start(quick());
    amid_good_attaches(&daemon, || {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0], &[0xff; 4096]] {
            let connection = daemon.connect();
            send_now(connection.as_fd(), garbage, &[]).unwrap();
            assert_eq!(raw(&connection), None);
        }
    });
}

#[test]
fn a_message_that_does_not_decode_is_refused() {
    let daemon = Daemon::start(quick());
    amid_good_attaches(&daemon, || {
        let mut unknown = protocol::empty();
        unknown.extend_from_slice(&[200, 1, 2, 3]);
        // A name that claims to be longer than anything that was sent.
        let mut liar = protocol::encode(&Request::Status { after: None }).unwrap();
        liar.truncate(8);
        liar.extend_from_slice(&[0, 253, 255, 255, 255, 255, 255, 255, 255, 255]);
        for packet in [protocol::empty(), unknown, liar] {
            let connection = daemon.connect();
            send_now(connection.as_fd(), &packet, &[]).unwrap();
            let (reply, _) = connection.receive(PATIENCE).unwrap();
            assert_eq!(refusal(reply).0, Refusal::BadRequest);
            assert!(is_closed(&connection));
        }
    });
}

#[test]
fn another_protocol_version_is_answered_with_ours() {
    let daemon = Daemon::start(quick());
    amid_good_attaches(&daemon, || {
        for version in [VERSION - 1, VERSION + 1] {
            let mut packet = protocol::encode(&Request::Status { after: None }).unwrap();
            packet[4..6].copy_from_slice(&version.to_le_bytes());
            let connection = daemon.connect();
            send_now(connection.as_fd(), &packet, &[]).unwrap();
            assert_eq!(raw(&connection), Some(protocol::empty()));
            assert_eq!(raw(&connection), None);
        }
    });
}

#[test]
fn an_oversized_packet_is_refused() {
    let daemon = Daemon::start(quick());
    amid_good_attaches(&daemon, || {
        let connection = daemon.connect();
        let mut packet = protocol::encode(&Request::Stop).unwrap();
        packet.resize(MAX_PACKET + 1, 0);
        send_now(connection.as_fd(), &packet, &[]).unwrap();
        let (code, reason) = refusal(connection.receive(PATIENCE).unwrap().0);
        assert_eq!(code, Refusal::BadRequest);
        assert!(reason.contains("larger than 65536"), "{reason}");
        assert!(is_closed(&connection));
    });
}

#[test]
fn silence_is_closed_at_its_deadline() {
    let daemon = Daemon::start(quick());
    amid_good_attaches(&daemon, || {
        assert!(is_closed(&daemon.connect()));
        let talked = daemon.connect();
        ask(&talked, &Request::Status { after: None });
        assert!(is_closed(&talked));
    });
}

#[test]
fn a_thousand_idle_connections_keep_nobody_out() {
    let room = raise_descriptor_limit() / 5;
    let count = 1000.min(room as usize);
    println!("{count} idle connections");
    let daemon = Daemon::start(quick());
    amid_good_attaches(&daemon, || {
        let idle: Vec<_> = (0..count).map(|_| daemon.connect()).collect();
        assert!(idle.iter().all(is_closed));
    });
}

#[test]
fn connections_over_the_limit_are_told_so_at_once() {
    let mut config = quick();
    config.limits.connections = 3;
    let daemon = Daemon::start(config);
    daemon.publish("m", 1);
    let mut leases = Vec::new();
    // The connection that published it may still count.
    eventually("three leases", || {
        leases.extend(attach(&daemon.socket, "m"));
        leases.len() == 3
    });
    let (code, reason) = refusal(daemon.connect().receive(PATIENCE).unwrap().0);
    assert_eq!(code, Refusal::Busy);
    assert!(reason.contains("3 connections"), "{reason}");
    drop(leases);
    eventually("room", || attach(&daemon.socket, "m").is_ok());
}

#[test]
fn descriptors_sent_unasked_are_closed() {
    let daemon = Daemon::start(quick());
    amid_good_attaches(&daemon, || {
        for request in [
            Request::Status { after: None },
            attach_request("good", Duration::ZERO),
        ] {
            let (ours, theirs) = rustix::pipe::pipe().unwrap();
            let connection = daemon.connect();
            let fds = vec![theirs.as_fd(); 100];
            connection.send(&request, &fds, PATIENCE).unwrap();
            let (code, reason) = refusal(connection.receive(PATIENCE).unwrap().0);
            assert_eq!(code, Refusal::BadRequest);
            assert!(reason.contains("100 descriptors"), "{reason}");
            assert!(is_closed(&connection));
            drop(theirs);
            // It ends only when no copy of the other end is left.
            assert_eq!(std::fs::File::from(ours).read(&mut [0; 1]).unwrap(), 0);
        }
    });
}

#[test]
fn twenty_peers_that_never_read_are_closed() {
    let daemon = Daemon::start(quick());
    let weights = Weights::with_slabs("wide", 1, 60);
    weights.offer(&daemon.announced("wide"));
    amid_good_attaches(&daemon, || {
        let peers: Vec<_> = (0..20)
            .map(|_| {
                let peer = daemon.connect();
                let request = attach_request("wide", Duration::ZERO);
                peer.send(&request, &[], PATIENCE).unwrap();
                peer
            })
            .collect();
        for peer in &peers {
            eventually("it is closed", || peer.is_closed());
        }
        assert_eq!(daemon.leases("wide"), 0);
    });
}

#[test]
fn a_peer_that_asks_and_never_reads_is_closed() {
    let mut config = quick();
    config.limits.entries = 100;
    let daemon = Daemon::start(config);
    for i in 0..40 {
        let worker = daemon.announced(&format!("failed-{i}"));
        let reason = "x".repeat(1000);
        ask(&worker, &Request::Failed { reason });
    }
    amid_good_attaches(&daemon, || {
        let peer = daemon.connect();
        let status = Request::Status { after: None };
        eventually("it is closed", || {
            matches!(
                peer.send(&status, &[], Duration::from_millis(50)),
                Err(SocketError::Closed)
            )
        });
    });
}

#[test]
fn an_engine_with_too_few_descriptors_says_so_and_attaches_once_it_has_more() {
    let daemon = Daemon::start(quick());
    let weights = Weights::with_slabs("m", 1, 40);
    weights.offer(&daemon.announced("m"));
    amid_good_attaches(&daemon, || {
        let wrapper = ["prlimit", "--nofile=24:1024"];
        let status = children::wrapped(&wrapper, "attaches_with_few_descriptors", &daemon.socket)
            .status()
            .unwrap();
        assert!(status.success());
    });
    assert_eq!(daemon.leases("m"), 0);
}

#[test]
fn descriptors_that_are_slow_to_close_hold_nobody_up() {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    let daemon = Daemon::start(quick());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut others = Vec::new();
    // More than the daemon has threads.
    for _ in 0..4 {
        let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        others.push(listener.accept().unwrap());
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(3600))).unwrap();
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 1 << 16]).is_ok() {}
        let peer = daemon.connect();
        let packet = protocol::encode(&attach_request("m", Duration::ZERO)).unwrap();
        send_now(peer.as_fd(), &packet, &[stream.as_fd()]).unwrap();
        // The daemon's is the last that holds it.
        drop(stream);
        let (code, _) = refusal(peer.receive(PATIENCE).unwrap().0);
        assert_eq!(code, Refusal::BadRequest);
    }
    amid_good_attaches(&daemon, || {});
}
