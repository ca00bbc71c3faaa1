"""Builds the capture of query vectors that a configuration asks for, and hooks it into the model."""

from __future__ import annotations

import logging
from typing import Any

import torch

from krul_backend.attention.similarity_worker import SimilarityWorker
from krul_backend.device import Device
from krul_backend.memory import format_bytes
from krul_sglang.config import KrulConfig
from krul_sglang.engine.capture.estimator_capture import EstimatorCapture
from krul_sglang.engine.capture.query_capture import CapturePlan, QueryCapture
from krul_sglang.engine.capture.turn_capture import QueryShape, TurnCapture
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.unsupported import check_estimator

logger = logging.getLogger(__name__)


def attach_turn_capture(model_runner: Any, config: KrulConfig) -> TurnCapture:
    """Build the capture for a model runner whose pools exist, and hook its model.

    Raises:
        ConfigError: see ``CapturePlan.fit``.
        UnsupportedSetupError: an estimator that needs eager forwards on a server with CUDA graphs, or a
            pool that krul does not know.
    """
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.cuda_graph_config import cuda_graph_fully_disabled

    modules = sorted(
        (module for module in model_runner.model.modules() if isinstance(module, RadixAttention)),
        key=lambda module: module.layer_id,
    )
    first = modules[0]
    shape = QueryShape(
        num_layers=len(modules),
        num_query_heads=first.tp_q_head_num,
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        dtype=model_runner.dtype,
        scaling=first.scaling,
    )
    if config.estimator == "sampled" or config.needs_query_rows:
        return _attach_sampled(model_runner, config, shape, modules)
    is_on_gpu = not Device.of(model_runner.req_to_token_pool.req_to_token).shares_cores
    check_estimator(config.estimator, runs_graphs=is_on_gpu and not cuda_graph_fully_disabled())
    return _attach_every_row(model_runner, shape, modules)


def _attach_sampled(
    model_runner: Any, config: KrulConfig, shape: QueryShape, modules: list[Any]
) -> QueryCapture:
    slots = model_runner.req_to_token_pool.req_to_token.shape[0]
    plan = CapturePlan.fit(
        shape, max_requests=slots, num_rows=config.query_rows, max_bytes=config.query_memory
    )
    capture = QueryCapture(shape, plan, device=torch.device(model_runner.device))
    capture.install(modules)
    logger.info(
        "krul: query rows of up to %d requests at a time, %d rows of %d heads each: %s",
        plan.num_requests,
        plan.num_rows,
        shape.num_query_heads,
        format_bytes(plan.num_bytes),
    )
    return capture


def _attach_every_row(model_runner: Any, shape: QueryShape, modules: list[Any]) -> EstimatorCapture:
    req_to_token = model_runner.req_to_token_pool.req_to_token
    capture = EstimatorCapture(
        shape,
        SimilarityWorker(),
        DevicePool(model_runner.token_to_kv_pool).gather_keys,
        req_to_token,
        max_requests=req_to_token.shape[0],
    )
    capture.install(modules)
    logger.info("krul: every token of every request is reduced to attention statistics")
    return capture
