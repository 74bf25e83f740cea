//! The transition table against an independent statement of it, over all states and a systematic set of masks.

use super::*;

const STATES: [ibv_qp_state; 7] =
    [IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR];
const TYPES: [ibv_qp_type; 3] = [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD];
/// Every attribute bit of the header, and one it does not have.
const BITS: [u32; 23] = [
    IBV_QP_STATE,
    IBV_QP_CUR_STATE,
    IBV_QP_EN_SQD_ASYNC_NOTIFY,
    IBV_QP_ACCESS_FLAGS,
    IBV_QP_PKEY_INDEX,
    IBV_QP_PORT,
    IBV_QP_QKEY,
    IBV_QP_AV,
    IBV_QP_PATH_MTU,
    IBV_QP_TIMEOUT,
    IBV_QP_RETRY_CNT,
    IBV_QP_RNR_RETRY,
    IBV_QP_RQ_PSN,
    IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_ALT_PATH,
    IBV_QP_MIN_RNR_TIMER,
    IBV_QP_SQ_PSN,
    IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_PATH_MIG_STATE,
    IBV_QP_CAP,
    IBV_QP_DEST_QPN,
    IBV_QP_RATE_LIMIT,
    1 << 30,
];

fn attr(to: ibv_qp_state, cur: ibv_qp_state) -> ibv_qp_attr {
    ibv_qp_attr { qp_state: to, cur_qp_state: cur, ..Default::default() }
}

/// Required and optional bits in words, as the specification's table lists them.
fn specification(
    qp_type: ibv_qp_type,
    from: ibv_qp_state,
    to: ibv_qp_state,
) -> Option<(&'static str, &'static str)> {
    let (rc, uc, ud) = (qp_type == IBV_QPT_RC, qp_type == IBV_QPT_UC, qp_type == IBV_QPT_UD);
    Some(match (from, to) {
        (_, IBV_QPS_RESET | IBV_QPS_ERR) => ("", ""),
        (IBV_QPS_RESET, IBV_QPS_INIT) if ud => ("pkey port qkey", ""),
        (IBV_QPS_RESET, IBV_QPS_INIT) => ("pkey port access", ""),
        (IBV_QPS_INIT, IBV_QPS_INIT) if ud => ("", "pkey port qkey"),
        (IBV_QPS_INIT, IBV_QPS_INIT) => ("", "pkey port access"),
        (IBV_QPS_INIT, IBV_QPS_RTR) if ud => ("", "pkey qkey"),
        (IBV_QPS_INIT, IBV_QPS_RTR) if uc => ("av mtu dest rqpsn", "alt access pkey"),
        (IBV_QPS_INIT, IBV_QPS_RTR) => ("av mtu dest rqpsn destrd rnrtimer", "alt access pkey"),
        (IBV_QPS_RTR, IBV_QPS_RTS) if rc => {
            ("sqpsn timeout retry rnrretry rd", "cur alt access mig rnrtimer")
        }
        (IBV_QPS_RTR, IBV_QPS_RTS) if uc => ("sqpsn", "cur alt access mig"),
        (IBV_QPS_RTR, IBV_QPS_RTS) => ("sqpsn", "cur qkey"),
        (IBV_QPS_RTS | IBV_QPS_SQD, IBV_QPS_RTS) if rc => ("", "cur alt access mig rnrtimer"),
        (IBV_QPS_RTS | IBV_QPS_SQD, IBV_QPS_RTS) if uc => ("", "cur alt access mig"),
        (IBV_QPS_RTS | IBV_QPS_SQD, IBV_QPS_RTS) => ("", "cur qkey"),
        (IBV_QPS_RTS, IBV_QPS_SQD) => ("", "sqdnotify"),
        (IBV_QPS_SQD, IBV_QPS_SQD) if rc => {
            ("", "port av timeout retry rnrretry rd destrd alt access pkey mig rnrtimer")
        }
        (IBV_QPS_SQD, IBV_QPS_SQD) if uc => ("", "av alt access pkey mig"),
        (IBV_QPS_SQD, IBV_QPS_SQD) => ("", "pkey qkey"),
        (IBV_QPS_SQE, IBV_QPS_RTS) if uc => ("", "cur access"),
        (IBV_QPS_SQE, IBV_QPS_RTS) if ud => ("", "cur qkey"),
        _ => return None,
    })
}

fn bits(words: &str) -> u32 {
    words
        .split_whitespace()
        .map(|word| match word {
            "pkey" => IBV_QP_PKEY_INDEX,
            "port" => IBV_QP_PORT,
            "qkey" => IBV_QP_QKEY,
            "access" => IBV_QP_ACCESS_FLAGS,
            "av" => IBV_QP_AV,
            "mtu" => IBV_QP_PATH_MTU,
            "dest" => IBV_QP_DEST_QPN,
            "rqpsn" => IBV_QP_RQ_PSN,
            "sqpsn" => IBV_QP_SQ_PSN,
            "destrd" => IBV_QP_MAX_DEST_RD_ATOMIC,
            "rd" => IBV_QP_MAX_QP_RD_ATOMIC,
            "rnrtimer" => IBV_QP_MIN_RNR_TIMER,
            "alt" => IBV_QP_ALT_PATH,
            "mig" => IBV_QP_PATH_MIG_STATE,
            "cur" => IBV_QP_CUR_STATE,
            "timeout" => IBV_QP_TIMEOUT,
            "retry" => IBV_QP_RETRY_CNT,
            "rnrretry" => IBV_QP_RNR_RETRY,
            "sqdnotify" => IBV_QP_EN_SQD_ASYNC_NOTIFY,
            other => panic!("no attribute {other}"),
        })
        .fold(0, |all, bit| all | bit)
}

/// Runs `check` for every transport and pair of states.
fn every_pair(mut check: impl FnMut(ibv_qp_type, ibv_qp_state, ibv_qp_state)) {
    for qp_type in TYPES {
        for from in STATES {
            for to in STATES {
                check(qp_type, from, to);
            }
        }
    }
}

#[test]
fn transition_agrees_with_the_specification() {
    every_pair(|qp_type, from, to| {
        let expected = specification(qp_type, from, to)
            .map(|(req, opt)| Masks { required: bits(req), optional: bits(opt) });
        assert_eq!(transition(qp_type, from, to), expected, "type {qp_type}, {from} to {to}");
    });
}

#[test]
fn check_mask_accepts_required_with_any_optional() {
    every_pair(|qp_type, from, to| {
        let Some((required, optional)) = specification(qp_type, from, to) else { return };
        let (required, optional) = (bits(required), bits(optional));
        // All subsets of the optional bits.
        let mut subset = optional;
        loop {
            let mask = IBV_QP_STATE | required | subset;
            assert_eq!(
                check_mask(qp_type, from, &attr(to, from), mask),
                Ok(to),
                "{qp_type}: {from} to {to}, {mask:#x}"
            );
            if subset == 0 {
                break;
            }
            subset = (subset - 1) & optional;
        }
    });
}

#[test]
fn check_mask_refuses_a_missing_required_bit() {
    every_pair(|qp_type, from, to| {
        let Some((required, optional)) = specification(qp_type, from, to) else { return };
        for bit in BITS.into_iter().filter(|bit| bits(required) & bit != 0) {
            for optional in [0, bits(optional)] {
                let mask = (IBV_QP_STATE | bits(required) | optional) & !bit;
                assert_eq!(check_mask(qp_type, from, &attr(to, from), mask), Err(libc::EINVAL), "{mask:#x}");
            }
        }
    });
}

#[test]
fn check_mask_refuses_every_foreign_bit() {
    every_pair(|qp_type, from, to| {
        let Some((required, optional)) = specification(qp_type, from, to) else { return };
        let known = bits(required) | bits(optional) | IBV_QP_STATE;
        for bit in BITS.into_iter().filter(|bit| known & bit == 0) {
            for optional in [0, bits(optional)] {
                let mask = IBV_QP_STATE | bits(required) | optional | bit;
                assert_eq!(
                    check_mask(qp_type, from, &attr(to, from), mask),
                    Err(libc::EINVAL),
                    "{qp_type}: {from} to {to}, {mask:#x}"
                );
            }
        }
    });
}

/// All masks of the attributes that the header knows, for every legal pair of states (of those to RESET and ERR, which
/// are alike, one): two million each.
#[test]
fn every_mask_of_every_transition_is_judged_as_specified() {
    let attributes: Vec<u32> =
        BITS.into_iter().filter(|bit| *bit != IBV_QP_STATE && *bit < 1 << 30).collect();
    let all = attributes.iter().fold(0, |all, bit| all | bit);
    let xrc = [(IBV_QPT_XRC_SEND, XRC_SEND_LACKS), (IBV_QPT_XRC_RECV, XRC_RECV_LACKS)];
    let types = TYPES.map(|qp_type| (qp_type, qp_type, 0)).into_iter();
    for (qp_type, as_type, lacks) in types.chain(xrc.map(|(qp_type, lacks)| (qp_type, IBV_QPT_RC, lacks))) {
        for (from, to) in STATES.into_iter().flat_map(|from| STATES.map(|to| (from, to))) {
            let Some((required, optional)) = specification(as_type, from, to) else { continue };
            if matches!(to, IBV_QPS_RESET | IBV_QPS_ERR) && from != IBV_QPS_RTS {
                continue;
            }
            let required = bits(required) & !lacks;
            let forbidden = !(required | bits(optional) | lacks);
            let attr = attr(to, from);
            let mut mask = all;
            loop {
                let good = mask & required == required && mask & forbidden == 0;
                let judged = check_mask(qp_type, from, &attr, relevant(qp_type, mask | IBV_QP_STATE));
                if judged != if good { Ok(to) } else { Err(libc::EINVAL) } {
                    panic!("{qp_type}: {from} to {to}, {mask:#x}: {judged:?}");
                }
                if mask == 0 {
                    break;
                }
                mask = (mask - 1) & all;
            }
        }
    }
}

#[test]
fn check_mask_refuses_illegal_pairs_whatever_the_mask() {
    every_pair(|qp_type, from, to| {
        if specification(qp_type, from, to).is_some() {
            return;
        }
        let all = BITS.into_iter().fold(0, |all, bit| all | bit);
        for mask in BITS.into_iter().chain([0, all, all >> 8]).map(|mask| mask | IBV_QP_STATE) {
            assert_eq!(check_mask(qp_type, from, &attr(to, from), mask), Err(libc::EINVAL), "{from} to {to}");
        }
    });
}

#[test]
fn check_mask_without_state_stays_where_it_is() {
    for qp_type in TYPES {
        for from in STATES {
            // The target in the attributes must not matter when STATE is not given.
            let outcome = check_mask(qp_type, from, &attr(IBV_QPS_ERR, from), 0);
            let legal = specification(qp_type, from, from).is_some();
            assert_eq!(outcome, if legal { Ok(from) } else { Err(libc::EINVAL) }, "{qp_type}: in {from}");
        }
    }
}

#[test]
fn check_mask_compares_the_assumed_state() {
    let mask = IBV_QP_STATE | IBV_QP_CUR_STATE;
    assert_eq!(check_mask(IBV_QPT_RC, IBV_QPS_RTS, &attr(IBV_QPS_RTS, IBV_QPS_RTS), mask), Ok(IBV_QPS_RTS));
    assert_eq!(check_mask(IBV_QPT_RC, IBV_QPS_RTS, &attr(IBV_QPS_RTS, IBV_QPS_SQD), mask), Err(libc::EINVAL));
}

#[test]
fn check_mask_refuses_other_states_and_transports() {
    assert_eq!(
        check_mask(IBV_QPT_RC, IBV_QPS_RTS, &attr(IBV_QPS_UNKNOWN, 0), IBV_QP_STATE),
        Err(libc::EINVAL)
    );
    assert_eq!(
        check_mask(IBV_QPT_RC, IBV_QPS_UNKNOWN, &attr(IBV_QPS_RESET, 0), IBV_QP_STATE),
        Err(libc::EINVAL)
    );
    let mask = IBV_QP_STATE | IBV_QP_PORT;
    assert_eq!(check_mask(IBV_QPT_DRIVER, IBV_QPS_RESET, &attr(IBV_QPS_INIT, 0), mask), Err(libc::EINVAL));
}

#[test]
fn check_values_knows_the_ranges() {
    let good = ibv_qp_attr {
        path_mtu: IBV_MTU_4096,
        dest_qp_num: 0xff_ffff,
        qp_access_flags: 0xf,
        port_num: 1,
        timeout: 31,
        retry_cnt: 7,
        rnr_retry: 7,
        min_rnr_timer: 31,
        max_rd_atomic: 128,
        max_dest_rd_atomic: 128,
        ..Default::default()
    };
    let all = !(IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE);
    assert_eq!(check_values(&good, all), Ok(()));
    type Spoil = fn(&mut ibv_qp_attr);
    let bad: [(u32, Spoil); 14] = [
        (IBV_QP_PKEY_INDEX, |a| a.pkey_index = 1),
        (IBV_QP_PORT, |a| a.port_num = 0),
        (IBV_QP_PORT, |a| a.port_num = 2),
        (IBV_QP_ACCESS_FLAGS, |a| a.qp_access_flags = 1 << 12),
        (IBV_QP_PATH_MTU, |a| a.path_mtu = 0),
        (IBV_QP_PATH_MTU, |a| a.path_mtu = 6),
        (IBV_QP_DEST_QPN, |a| a.dest_qp_num = 1 << 24),
        (IBV_QP_TIMEOUT, |a| a.timeout = 32),
        (IBV_QP_RETRY_CNT, |a| a.retry_cnt = 8),
        (IBV_QP_RNR_RETRY, |a| a.rnr_retry = 8),
        (IBV_QP_MIN_RNR_TIMER, |a| a.min_rnr_timer = 32),
        (IBV_QP_MAX_QP_RD_ATOMIC, |a| a.max_rd_atomic = 129),
        (IBV_QP_MAX_DEST_RD_ATOMIC, |a| a.max_dest_rd_atomic = 129),
        (IBV_QP_MAX_DEST_RD_ATOMIC, |a| a.max_dest_rd_atomic = 255),
    ];
    for (bit, spoil) in bad {
        let mut attr = good;
        spoil(&mut attr);
        assert_eq!(check_values(&attr, bit), Err(libc::EINVAL), "bit {bit:#x}");
        assert_eq!(check_values(&attr, all & !bit), Ok(()), "bit {bit:#x} not in the mask");
    }
    assert_eq!(check_values(&good, IBV_QP_ALT_PATH), Err(libc::EOPNOTSUPP));
    assert_eq!(check_values(&good, IBV_QP_PATH_MIG_STATE), Ok(()));
}

#[test]
fn xrc_takes_what_its_side_has_and_ignores_the_rest() {
    let attr = ibv_qp_attr { qp_state: IBV_QPS_RTR, ..Default::default() };
    let all = IBV_QP_STATE | RC_TO_RTR;
    for (qp_type, lacks) in [(IBV_QPT_XRC_SEND, XRC_SEND_LACKS), (IBV_QPT_XRC_RECV, XRC_RECV_LACKS)] {
        let mask = relevant(qp_type, all);
        assert_eq!(mask, all & !lacks);
        assert_eq!(check_mask(qp_type, IBV_QPS_INIT, &attr, mask), Ok(IBV_QPS_RTR));
        assert_eq!(check_mask(qp_type, IBV_QPS_INIT, &attr, mask & !IBV_QP_AV), Err(libc::EINVAL));
        assert_eq!(check_mask(qp_type, IBV_QPS_INIT, &attr, mask | IBV_QP_QKEY), Err(libc::EINVAL));
    }
}

#[test]
fn raw_packets_have_little_to_set() {
    let init = attr(IBV_QPS_INIT, 0);
    let check = |mask| check_mask(IBV_QPT_RAW_PACKET, IBV_QPS_RESET, &init, mask);
    assert_eq!(check(IBV_QP_STATE | IBV_QP_PORT), Ok(IBV_QPS_INIT));
    assert_eq!(check(IBV_QP_STATE), Err(libc::EINVAL));
    assert_eq!(check(IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX), Err(libc::EINVAL));
    for (from, to) in [(IBV_QPS_INIT, IBV_QPS_RTR), (IBV_QPS_RTR, IBV_QPS_RTS)] {
        let attr = attr(to, 0);
        assert_eq!(check_mask(IBV_QPT_RAW_PACKET, from, &attr, IBV_QP_STATE), Ok(to));
        let with_port = IBV_QP_STATE | IBV_QP_PORT;
        assert_eq!(check_mask(IBV_QPT_RAW_PACKET, from, &attr, with_port), Err(libc::EINVAL));
    }
}
