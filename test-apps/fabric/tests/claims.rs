//! The claims that take seconds, so that every build checks them.

use metaroce_fabric::claims::{Extent, run_all};

/// Proves MR-CC-11.
#[test]
fn fast_claims_hold() {
    let rows = run_all(Extent::Tests, None, |_| {});
    let missed: Vec<String> = rows
        .iter()
        .filter(|r| !r.good)
        .map(|r| format!("{}: {}: goal {}, measured {}", r.claim, r.what, r.goal, r.measured))
        .collect();
    assert!(rows.len() > 20, "only {} rows", rows.len());
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}
