"""From a session tree to trajectories: one per leaf, every sampled token trained in exactly one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from miles_contracts import (
    RoutingTrace,
    SamplingTransform,
    Status,
    Trajectory,
    TrajectoryIdentity,
    Turn,
    VersionSpan,
)
from miles_rollout.session.audit import SampleRecord, SessionCounters
from miles_rollout.session.nodes import Node, path_ids
from miles_rollout.session.tree import SessionTree


def trajectories(
    tree: SessionTree,
    identity: TrajectoryIdentity,
    sampling: SamplingTransform,
    *,
    records: Mapping[str, SampleRecord],
    counters: SessionCounters | None = None,
    num_experts: int | None = None,
) -> tuple[Trajectory, ...]:
    """Trajectories of all leaves in order of commit; empty when nothing was sampled.

    A generation that several leaves share is trained in the first of them; in the others its tokens keep their
    log-probs and versions but are masked.

    Args:
        tree: the session's generations.
        identity: where they belong; `leaf` is set here.
        sampling: the transform that all turns were sampled under.
        records: the engine's records by request id; each trajectory carries those of its turns.
        counters: put into the first trajectory's metadata.
        num_experts: experts a layer, for the routing trace.
    """
    done: set[Node] = set()
    out = []
    for leaf, node in enumerate(tree.leaves()):
        path = node.path()
        metadata: dict[str, Any] = {
            "engine_record": [msgspec.to_builtins(records[n.sampled.request_id]) for n in path],
            "nodes": [n.seq for n in path],
        }
        if counters is not None and leaf == 0:
            metadata["session"] = msgspec.to_builtins(counters)
        out.append(
            _trajectory(path, done, msgspec.structs.replace(identity, leaf=leaf), sampling, num_experts, metadata)
        )
        done.update(path)
    return tuple(out)


def _trajectory(
    path: list[Node],
    done: set[Node],
    identity: TrajectoryIdentity,
    sampling: SamplingTransform,
    num_experts: int | None,
    metadata: dict[str, Any],
) -> Trajectory:
    ids = path_ids(path)
    mask = np.zeros(len(ids), dtype=np.bool_)
    logprobs = np.full(len(ids), np.nan, dtype=np.float32)
    spans: list[VersionSpan] = []
    turns = []
    for node in path:
        start, end = node.sampled_start, node.end
        mask[start:end] = node not in done
        logprobs[start:end] = node.sampled.logprobs
        spans.extend(
            VersionSpan(start=start + s.start, end=start + s.end, version=s.version) for s in node.sampled.version_spans
        )
        turns.append(
            Turn(
                start=start,
                end=end,
                finish_reason=node.sampled.finish_reason,
                request_id=node.sampled.request_id,
                cached_tokens=node.sampled.cached_tokens,
            )
        )
    return Trajectory(
        identity=identity,
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        version_spans=tuple(spans),
        status=Status.TRUNCATED if path[-1].sampled.truncated else Status.FINISHED,
        sampling=sampling,
        turns=tuple(turns),
        routing=_routing(path, num_experts),
        metadata=metadata,
    )


def _routing(path: list[Node], num_experts: int | None) -> RoutingTrace | None:
    """Rows by provenance: each token's row comes from the request in which it was fed for the first time."""
    parts = [node.routing for node in path if node.routing is not None]
    if len(parts) != len(path) or num_experts is None:
        return None
    return RoutingTrace.of(np.concatenate(parts), num_experts)


def tree_counters(tree: SessionTree) -> SessionCounters:
    """The counters that follow from the tree alone."""
    abandoned = [node for node in tree.nodes if tree.abandoned(node)]
    leaves = sum(not node.children for node in tree.nodes) - len(abandoned)
    repairs: dict[str, int] = {}
    for node in tree.nodes:
        for kind in sorted(node.repairs):
            repairs[str(kind)] = repairs.get(str(kind), 0) + 1
    return SessionCounters(
        turns=len(tree.nodes),
        sampled_tokens=sum(len(node.sampled.output_ids) for node in tree.nodes),
        trajectories=leaves,
        branches=max(leaves - 1, 0),
        abandoned_turns=len(abandoned),
        abandoned_tokens=sum(len(node.sampled.output_ids) for node in abandoned),
        truncated_turns=sum(node.sampled.truncated for node in tree.nodes),
        demoted_messages=sum(node.demoted for node in tree.nodes),
        repairs=repairs,
    )
