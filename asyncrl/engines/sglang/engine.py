"""An SGLang server as an engine: launched by us, or already running.

A load pauses the server, updates the weights (from a folder or from the learner), and continues. Generations in
progress keep their slots and their KV cache. New requests are held back during the load, so a request's prefix is
computed with the weights it was sent under. The key of the prefix cache changes with every load, so a new request never
reuses keys of older weights. Only one engine may use a server: it notices the weights of another one (versions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.adapter import RunConfig
from asyncrl.config.learner import LoraSection
from asyncrl.data.model_folder import check_model
from asyncrl.engines.adapter import FIRST_VERSION, EngineAdapter
from asyncrl.engines.generation import Generation, PartialGeneration, Version
from asyncrl.engines.port import EngineStats, Meeting
from asyncrl.engines.sglang import server
from asyncrl.engines.sglang.adapters import Adapters, adapts_experts, buffer_bytes
from asyncrl.engines.sglang.adapters import server_arguments as lora_arguments
from asyncrl.engines.sglang.checks import (
    check_adapters,
    check_architecture,
    check_attached,
    check_draft,
    check_dtype,
    check_experts,
    check_installed,
    check_machines,
    check_memory_saver,
    check_on_cpu,
    check_own_draft,
    check_version,
    context_before_start,
    context_of_server,
    installed_version,
    is_whole,
    keeps_draft,
    late_tokens,
    numbers,
    ranks_with_loader,
    why_no_experts,
)
from asyncrl.engines.sglang.client import Places, ServerClient, ask_first, lines, wait_until_healthy
from asyncrl.engines.sglang.images import ImageRequests, check_vision, image_arguments
from asyncrl.engines.sglang.machines import FOLLOWING_PORTS, Nodes, Part, address_of, join_engine
from asyncrl.engines.sglang.options import (
    EXACT,
    MEMORY_SAVER,
    QUANTIZATIONS,
    check_arguments,
    check_exact,
    check_updater_arguments,
    draft_bytes,
    has_drafts,
    metrics_arguments,
)
from asyncrl.engines.sglang.options import Options as Options
from asyncrl.engines.sglang.reply import EXPERTS_OPTION, Reply, generate_request, names_experts, require_support
from asyncrl.engines.sglang.server import ServedModel, read_model
from asyncrl.engines.sglang.versions import SettledVersion, Stamps, new_owner
from asyncrl.engines.sglang.weights import SGLangUpdater, WeightLoader
from asyncrl.engines.stopping import StopReader
from asyncrl.engines.validation import check_prompt, check_sampling, check_stop_tokens, check_weights
from asyncrl.errors import ConfigError, EngineDied, EngineError, WeightsError
from asyncrl.images.store import ImageFile
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.tensors import int4, quantized_model
from asyncrl.tensors.device import read_gpu_memory, resolve_device
from asyncrl.tensors.model_tensors import read_shapes
from asyncrl.version import VERSION
from asyncrl.weights.port import LoadReport

log = logging.getLogger(__name__)

_COMPILES: Final = " (a machine's first start with experts in 4 bits compiles kernels, six minutes on one core)"
"""Of SGLang 0.5.16 on an H200: the first CUDA graph took 358 s, and 0.8 s in the next start."""
_FIRST_TOKENS: Final = 4
"""Tokens of a first request and its answer of two."""
_IDLE_SECONDS: Final = 30.0
"""Time for a server's last batch to end before its memory leaves the GPUs."""
_WORKSPACE_BYTES: Final = 10 * 2**30
"""What a server takes besides weights and cache: CUDA context, graphs, activations, logits, a load's tensors."""
_LEAST_WORKSPACE_BYTES: Final = 5 * 2**30
"""Of them, what it needs: 4 GiB at 8B, a graph of 512 sequences and a load's tensors among them."""
_WEIGHTS_ALONE: Final = {"tags": ["weights"]}
_ALL_BUT_WEIGHTS: Final = {"tags": ["kv_cache", "cuda_graph"]}
_LEAST_CACHE_BYTES: Final = 2**31
"""Smallest cache of keys and values to start with."""


class SGLangEngine(EngineAdapter):
    """See Engine in engines/port.py."""

    options_type = Options
    takes = frozenset({"adapters", *QUANTIZATIONS})
    reads_images = True

    @classmethod
    def build(cls, run: RunConfig, *, name: str) -> SGLangEngine:
        options, device = cls.options(run), resolve_device(run.engine.device, section="engine")
        if run.run.colocated and run.run.offload != "learner" and device == "cuda":
            options = replace(options, server_arguments=MEMORY_SAVER | options.server_arguments)
        if run.metrics.prometheus:
            options = replace(options, server_arguments=metrics_arguments() | options.server_arguments)
        if run.model.trust_remote_code:
            options = replace(options, server_arguments={"trust-remote-code": True} | dict(options.server_arguments))
        if run.run.exact:
            options = replace(options, server_arguments=EXACT | options.server_arguments)
        return cls(
            Path(run.model.path),
            device=device,
            dtype=run.model.dtype,
            version=FIRST_VERSION,
            options=options,
            log_path=run.run_directory / "logs" / f"{name}.engine.log",
            lora=run.learner.lora if run.learner.lora.publish == "adapter" else None,
            quantization=run.weights.quantization,
            quantized=run.run_directory / f"model-{run.weights.quantization}",
            reports_experts=run.rollout.routing_replay == "on",
            reports_support=run.rollout.top_p < 1 or run.rollout.top_k > 0,
            has_drafts=has_drafts(run),
        )

    @classmethod
    def why_no_experts(cls, run: RunConfig) -> str:
        """For an external server, only if the run requests experts: its options are unknown until it is asked."""
        options: Options = cls.options(run)
        if not options.url:
            return why_no_experts(check_model(Path(run.model.path)).architecture, version=installed_version())
        if run.rollout.routing_replay == "on":
            return ""
        return "whether the server at engine.options.url reports its experts is unknown before it is asked"

    @classmethod
    def check(cls, run: RunConfig) -> None:
        options: Options = cls.options(run)
        if options.url:
            check_attached(run)
        else:
            check_arguments(options.server_arguments, has_drafts=has_drafts(run))
            check_own_draft(run, options)
            if run.learner.lora.publish == "adapter":
                check_adapters(options.server_arguments)
        if run.run.exact:
            check_exact(options.server_arguments)
        check_machines(run, options.machines)

    @classmethod
    def check_weight_updater(cls, run: RunConfig) -> None:
        options: Options = cls.options(run)
        check_updater_arguments(options.server_arguments)

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        options: Options = cls.options(run)
        if options.url:
            return
        super().check_machine(run)
        check_installed()
        device = resolve_device(run.engine.device, section="engine")
        if run.run.colocated and run.run.offload != "learner" and device == "cuda":
            check_memory_saver()
        cls.check_device(run, device)

    @classmethod
    def check_device(cls, run: RunConfig, device: str) -> None:
        options: Options = cls.options(run)
        if options.url:
            return
        check_dtype(run.model.dtype, device=device, server_arguments=options.server_arguments)
        check_on_cpu(options.server_arguments, device=device)
        path, quantization = Path(run.model.path), run.weights.quantization
        lora = run.learner.lora
        if device == "cpu" and lora.publish == "adapter" and adapts_experts(lora, read_shapes(path)):
            raise ConfigError(
                "learner.lora.publish: SGLang's CPU server has no kernels for adapters of experts; name other "
                'learner.lora.modules, such as ["q_proj", "k_proj", "v_proj", "o_proj"], or use publish = "merged"'
            )
        check_architecture(path, device=device, quantization=quantization, options=options)
        check_experts(path, quantization=quantization, dtype=run.model.dtype, options=options)
        check_vision(path)

    @classmethod
    def num_gpus(cls, run: RunConfig) -> int:
        options: Options = cls.options(run)
        return 0 if options.url or run.engine.device == "cpu" else options.tensor_parallel

    @classmethod
    def gpu_bytes(cls, run: RunConfig) -> int:
        options: Options = cls.options(run)
        if not cls.num_gpus(run) or _has_own_share(options):
            return 0
        shapes, width = read_shapes(Path(run.model.path)), 2 if run.model.dtype == "bfloat16" else 4
        weights = quantized_model.count_bytes(shapes, run.weights.quantization, width=width) // options.tensor_parallel
        adapters = buffer_bytes(
            run.learner.lora if run.learner.lora.publish == "adapter" else None,
            shapes,
            given=options.server_arguments,
            ranks=options.tensor_parallel,
            width=width,
        )
        drafts = draft_bytes(options.server_arguments) // options.tensor_parallel
        return weights + adapters + drafts + _WORKSPACE_BYTES + _LEAST_CACHE_BYTES

    @classmethod
    def machines(cls, run: RunConfig) -> int:
        options: Options = cls.options(run)
        return options.machines

    @classmethod
    def context_tokens(cls, run: RunConfig, *, of_model: int) -> int:
        return context_before_start(cls.options(run), device=run.engine.device, of_model=of_model)

    def __init__(
        self,
        model_path: Path,
        *,
        device: str,
        dtype: str,
        version: Version,
        options: Options,
        log_path: Path,
        lora: LoraSection | None = None,
        quantization: str = "",
        quantized: Path = Path(),
        reports_experts: bool = False,
        reports_support: bool = False,
        has_drafts: bool = False,
    ) -> None:
        """
        log_path       file for the output of a launched server
        lora           settings of the adapters that versions consist of; None if versions are whole models
        quantization   format of the weights; empty if they stay in their trained dtype
        quantized      folder for a copy of the model in that format
        reports_experts  whether to report the experts of each token, for answers to be trained
        reports_support  whether the server must say what each token was sampled from; rows may ask for it all the same
        has_drafts       whether the folder of every version has the model's draft layers
        """
        self._model = ServedModel(path=model_path, quantization=quantization)  # until the folder is read
        self._device = device
        self._dtype = dtype
        self._quantized = quantized
        self._first_version = version
        self._stamps = Stamps(first_version=version, owner=new_owner(), url=options.url)
        self._options = options
        self._log_path = log_path
        self._client = ServerClient(options.url.rstrip("/"), request_seconds=options.request_seconds)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="engine-read")
        self._reports_experts = reports_experts
        self._reports_support = reports_support
        self._has_drafts = has_drafts
        self._context_tokens, self._cache_tokens = 2**31, 0  # until the server is asked
        self._stops = StopReader(model_path, self._reader)
        self._has_spans = False
        self._late_tokens = 1
        self._settled = SettledVersion(version, self._ask_for_a_token, lambda: self.version)
        self._cache_owner = uuid.uuid4().hex
        self._places, self._images = Places(), ImageRequests()
        self._loader = WeightLoader(
            self._client.control,
            pause=options.pause,
            first_version=version,
            stamps=self._stamps,
            places=self._places,
        )
        self._lora = lora
        self._adapters = Adapters(self._client.control, first_version=version) if lora else None
        self._updater: SGLangUpdater | None = None
        self._tokens_generated = 0
        self._replies = set[Reply]()
        self._are_weights_there = self._has_cache = True
        """What of the server's memory is on the GPUs; it leaves and comes in these two parts."""
        self._memory_bytes = 0  # 0: SGLang's own share
        self._nodes: Nodes | None = None
        self._ending: asyncio.Task[None] | None = None
        """Ends the server once another machine's part of it is lost."""

    def limit_memory(self, num_bytes: int) -> None:
        """See LimitsMemory. A share that the user has set stays."""
        if not _has_own_share(self._options) and self._device == "cuda":
            self._memory_bytes = num_bytes

    def meet_at(self, meeting: Meeting) -> None:
        """See SpansMachines."""
        self._nodes = Nodes(meeting, count=self._options.machines - 1, settings=self._settings())

    async def join(self, meeting: Meeting, *, seconds: float) -> str:
        """See SpansMachines."""
        try:
            return await join_engine(
                meeting,
                parts=self._options.machines,
                settings=self._settings(),
                start=self._start_part,
                seconds=seconds,
            )
        finally:
            await self.close()

    async def start(self) -> None:
        """Start or attach. Raises ConfigError, or EngineDied with the end of the server's log."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        await self._read_model()
        is_ours = not self.url
        self._client.open(is_ours=is_ours)
        if is_ours:
            await self._launch(await self._gather())
        note = _COMPILES if is_ours and self._model.quantization in int4.GROUPS else ""
        await wait_until_healthy(self._client, seconds=self._options.start_seconds, note=note)
        await self._ask_server()

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
        images: Sequence[ImageFile] = (),
    ) -> Generation:
        """Generate an answer.

        Images travel as data in the request: the server may be on another machine.

        The server follows ``seed`` if it has enable-deterministic-inference; else its samples depend on the rest of the
        batch.
        """
        self._client.check_open()
        check_sampling(sampling)
        is_seen, partial = partial is not None, PartialGeneration() if partial is None else partial
        stop = await self._stops.strings(sampling)
        prompt_tokens, sampling = partial.prefix.continue_from(prompt_tokens, sampling)
        check_prompt(
            prompt_tokens,
            max_new_tokens=sampling.max_new_tokens,
            vocabulary_size=self._model.vocabulary_size,
            context_tokens=self._context_tokens,
        )
        check_stop_tokens(sampling, vocabulary_size=self._model.vocabulary_size)  # would kill the server
        shown = await self._images.show(prompt_tokens, images)
        asked = time.monotonic()
        async with self._places.place(has_images=bool(shown)) as note_read:
            held_seconds = time.monotonic() - asked
            with (self._adapters or self._loader).in_use() as (version, names):
                reply = Reply(
                    sent_version=version,
                    stamps=self._stamps,
                    keeps_version=bool(names),
                    experts=self._model.experts if sampling.is_trained else None,
                    num_prompt_tokens=len(prompt_tokens),
                    has_support=sampling.reports_support,
                    has_likeliest=sampling.top_logprobs > 0,
                    held_seconds=held_seconds,
                )
                partial.follow(reply)
                stream = is_seen or bool(shown) or not self._has_spans
                request = self._request(prompt_tokens, sampling, seed=seed, stream=stream)
                self._replies.add(reply)
                try:
                    await self._sample(reply, request | shown | names, sent=version, note_read=note_read)
                finally:
                    self._replies.remove(reply)
        return await self._stops.cut(partial.prefix.then(reply.generation()), sampling, stop)

    async def load(self, weights: WeightVersion) -> LoadReport:
        self._client.check_open()
        if self._adapters is not None:
            return await self._adapters.load(weights.version, Path(weights.uri))
        check = functools.partial(
            check_weights, weights, expected=self._model.shapes, optional=self._model.optional_names
        )
        folder = await asyncio.get_running_loop().run_in_executor(self._reader, check)
        before = self.version
        report = await self._loader.load(weights, folder)
        self._settled.note_load(weights.version, before=before)
        return report

    async def pause(self) -> None:
        await self._loader.hold()

    async def unpause(self) -> None:
        await self._loader.let_go()

    async def server_metrics(self) -> str:
        return await self._client.server_metrics()

    async def release(self) -> None:
        """Raises EngineError if the server stays busy: a release would kill it then."""
        until = time.monotonic() + _IDLE_SECONDS
        while True:  # the last batch may end shortly after the last answer, and the server sends no notification
            try:
                async with self._client.post("/flush_cache", {}):  # answers in plain text
                    break
            except EngineError as error:
                if isinstance(error, EngineDied) or time.monotonic() > until:
                    raise
                await asyncio.sleep(0.01)
        await self._client.control("/release_memory_occupation", {} if self._has_cache else _WEIGHTS_ALONE)
        self._are_weights_there = self._has_cache = False

    async def resume(self, *, has_cache: bool = True) -> None:
        if not self._are_weights_there:
            await self._client.control("/resume_memory_occupation", _WEIGHTS_ALONE)
            self._are_weights_there = True
        if has_cache and not self._has_cache:
            await self._client.control("/resume_memory_occupation", _ALL_BUT_WEIGHTS)
            self._has_cache = True

    @property
    def url(self) -> str:
        """URL of the server; empty until it is launched."""
        return self._client.url

    @property
    def version(self) -> Version:
        return (self._adapters or self._loader).version

    @property
    def weight_updater(self) -> SGLangUpdater | None:
        return self._updater

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self._places.running,
            queued=self._places.queued,
            context_tokens=0 if self._has_spans else sum(reply.num_context_tokens for reply in self._replies),
            cache_tokens=self._cache_tokens,
            tokens_generated=self._tokens_generated,
            is_live=not self._has_spans,  # without spans, replies are streamed
            is_away=self._loader.is_held,
        )

    async def close(self) -> None:
        if self._ending is not None:
            self._ending.cancel()
        its = self._client.server
        if self._nodes is not None:
            await self._nodes.close(is_over=its is not None and its.is_alive and self._nodes.are_whole)
        await self._settled.close()
        await self._client.close()
        if its:
            await its.close()
        self._stops.close()
        self._reader.shutdown(wait=False)

    # -- start ---------------------------------------------------------------------------------------------------------

    async def _read_model(self) -> None:
        read = functools.partial(
            read_model, self._model, quantized=self._quantized, reports_experts=self._reports_experts
        )
        self._model = await asyncio.get_running_loop().run_in_executor(self._reader, read)

    async def _gather(self) -> Part | None:
        """Wait for the engine's other machines. Return this one's part, or None if it is alone. Raises EngineDied."""
        parts = self._options.machines
        if parts == 1:
            return None
        if self._nodes is None:
            raise ConfigError(
                "engine.options.machines: engines of several machines are for the workers of a run (`asyncrl run`, or "
                "`asyncrl rollout-worker --meet HOST:PORT`); use machines = 1 here"
            )
        await self._nodes.gather(seconds=self._options.start_seconds)
        address = self._nodes.address
        meet = address_of(address, server.find_free_port(address, following=FOLLOWING_PORTS))
        await self._nodes.begin(meet)
        return Part(number=0, parts=parts, meet=meet, address=address)

    async def _start_part(self, part: Part) -> server.ServerProcess:
        await self._read_model()
        return await self._launch(part)

    def _settings(self) -> dict[str, str]:
        """Return what all machines of the engine must share."""
        options = self._options
        ours = {
            "asyncrl": VERSION,
            "model.dtype": self._dtype,
            "engine.device": self._device,
            "engine.options.machines": str(options.machines),
            "engine.options.tensor_parallel": str(options.tensor_parallel),
            "engine.options.server_arguments": json.dumps(options.server_arguments, sort_keys=True, default=str),
            "weights.quantization": self._model.quantization,
            "rollout.routing_replay": str(self._reports_experts),
            "learner.lora": str(self._lora),
        }
        with contextlib.suppress(metadata.PackageNotFoundError):
            ours["sglang"] = metadata.version("sglang")
        return ours

    async def _launch(self, part: Part | None = None) -> server.ServerProcess:
        """Start a server, which responds half a minute later, or more, or a part of one. Another server may take its
        port before, so ``_ask_server`` looks for our stamp. Raises ConfigError."""
        options = self._options
        check_installed()
        check_arguments(options.server_arguments, has_drafts=self._has_drafts)
        check_dtype(self._dtype, device=self._device, server_arguments=options.server_arguments)
        memory: dict[str, Any] = {}
        if self._memory_bytes:
            free = (await asyncio.to_thread(read_gpu_memory)).free
            memory["mem-fraction-static"] = static_share(self._memory_bytes, free=free)
        port = server.find_free_port()
        command = server.server_command(
            self._model.path,
            device=self._device,
            dtype=self._dtype,
            port=port,
            weight_version=self._stamps.format(self._first_version),
            tensor_parallel=options.tensor_parallel,
            quantization=self._model.quantization,
            stream_interval=options.stream_interval,
            server_arguments={
                **image_arguments(self._model.path),
                **lora_arguments(self._lora, self._model.shapes, device=self._device),
                **memory,
                **options.server_arguments,
                **(part.arguments if part else {}),
            },
            reports_experts=self._reports_experts,
        )
        log.info("starting SGLang, output in %s: %s", self._log_path, " ".join(command))
        environment = server.server_environment(os.environ, device=self._device, options=options)
        if part:
            environment = part.environment | environment
        self._client.url = f"http://127.0.0.1:{port}"
        its = server.ServerProcess(command, environment=environment, log_path=self._log_path)
        self._client.server = its
        await its.start()
        if self._nodes is not None:
            self._ending = asyncio.create_task(self._end_with(self._nodes, its))
        return its

    async def _end_with(self, nodes: Nodes, its: server.ServerProcess) -> None:
        """waits for: the loss of another machine's part of the server"""
        reason = await nodes.wait_for_loss()
        log.error("%s; the engine ends", reason)
        its.end_because(reason)

    async def _ask_server(self) -> None:
        """Query the server's version, its scheduler, and how it reports weight versions. Also warms it up."""
        is_ours = self._client.server is not None
        info = await self._client.get("/server_info")
        model = await self._client.get("/model_info")
        self._late_tokens = late_tokens(info)
        self._places.max_running = int(info.get("max_running_requests") or self._places.max_running)
        self._context_tokens = context_of_server(
            info, self._options, url=self.url, device=self._device, of_model=self._model.context_tokens
        )
        self._cache_tokens = int(info.get("max_total_num_tokens") or 0) * int(info.get("dp_size") or 1)
        stamp = str(model.get("weight_version", ""))
        if is_ours and stamp != self._stamps.format(self._first_version):
            raise EngineDied(f"the server at {self.url} is not the one started here: it serves weights {stamp!r}")
        self._loader.version = self._first_version
        self._loader.has_sessions = await self._client.has_endpoint("/begin_weight_update")
        quantization = None if self._lora else self._model.quantization
        self._loader.ranks_with_loader = ranks_with_loader(info, quantization, is_ours=is_ours)
        self._loader.is_whole = is_whole(info)
        self._loader.keeps_draft = is_ours and keeps_draft(info)
        if self._reports_experts and not info.get(EXPERTS_OPTION.replace("-", "_")):
            raise ConfigError(f'rollout.routing_replay = "on" needs --{EXPERTS_OPTION} of the server at {self.url}')
        version = str(info.get("version", "0"))
        check_version(self._options, url=self.url, version=version)
        if self._reports_experts and (why := why_no_experts(self._model.architecture, version=numbers(version))):
            raise ConfigError(f'rollout.routing_replay: "on" cannot be: {self.url}: {why}; or use "off"')
        if not self._loader.keeps_draft:
            check_draft(info, url=self.url, has_drafts=self._has_drafts)
        self._updater = SGLangUpdater(
            self._client.control,
            self._loader,
            num_ranks=int(info.get("tp_size") or 1),
            shapes=self._model.shapes,
            optional=self._model.optional_names,
        )
        if not is_ours and (found := self._other_weights(model)):
            await self._load_model(found)
        answer = await ask_first(self._client, self._short_request(), seconds=self._options.start_seconds)
        if self._reports_support:
            require_support(answer["meta_info"])
        experts = self._model.experts
        if experts and not names_experts(answer["meta_info"], experts, num_tokens=_FIRST_TOKENS):
            log.warning(
                "SGLang at %s does not say to which experts it routed a token, so the learner routes by itself; set "
                'rollout.routing_replay = "off", or moe-runner-backend = "triton" in engine.options.server_arguments',
                self.url,
            )
        has_spans = "weight_versions" in answer["meta_info"]
        if self._options.version_source == "spans" and not has_spans:
            raise ConfigError(f"version_source = 'spans' needs SGLang 0.5.23, {self.url} is {version}")
        self._has_spans = has_spans and self._options.version_source != "stream"
        self._settled.newest = self._loader.version
        async with self._client.post("/freeze_gc", {}):
            pass  # exempts existing objects from garbage collection: a full collection would stall all generations

    def _other_weights(self, about: Mapping[str, Any]) -> str:
        """Return that the server "has weights of ...", unless they are model.path's; then an empty string.

        about  the server's /model_info. SGLang changes its model_path with every load of a folder. The server may be on
               another machine, where the folder has the same path
        """
        stamp, served = str(about.get("weight_version", "")), str(about.get("model_path", ""))
        if self._stamps.is_foreign(stamp):
            return f"has weights of another run or worker ({stamp})"
        if served and Path(served).resolve() == self._model.path.resolve():
            return ""
        return f"has the weights of {served or 'an unknown folder'}"

    async def _load_model(self, found: str) -> None:
        """Load model.path into a server with other weights: the learner announces none before the first step.

        Raises EngineDied.  found: what weights the server has, for messages
        """
        folder = self._model.path
        log.warning("the server at %s %s; it loads model.path, %s", self.url, found, folder)
        self._loader.doubt_session()
        incarnation, policy_version = self._first_version
        first = WeightVersion(incarnation=incarnation, policy_version=policy_version, uri=str(folder))
        try:
            await self._loader.load(first, folder)
        except WeightsError as error:
            raise EngineDied(
                f"the server at {self.url} {found}, and cannot load model.path; restart it with --model-path {folder}: "
                f"{error}"
            ) from error

    # -- generate ------------------------------------------------------------------------------------------------------

    def _request(
        self, prompt_tokens: NDArray[np.int32], sampling: SamplingParams, *, stream: bool, seed: int = 0
    ) -> dict[str, Any]:
        return generate_request(
            prompt_tokens,
            sampling,
            seed=seed,
            vocabulary_size=self._model.vocabulary_size,
            stream_interval=self._options.stream_interval if stream and self._has_spans else None,
            reports_experts=self._model.experts is not None and sampling.is_trained,
            stream=stream,
            # Key of the prefix cache: unique to this engine, and new after every load.
            extra_key=f"{self._cache_owner}:{self._loader.num_loads}",
        )

    def _short_request(self) -> dict[str, Any]:
        """Return a request with two prompt tokens and two new tokens."""
        sampling = SamplingParams(max_new_tokens=2, ignore_eos=True, top_k=2 if self._reports_support else 0)
        return self._request(np.zeros(_FIRST_TOKENS - 2, dtype=np.int32), sampling, stream=False)

    async def _ask_for_a_token(self) -> None:
        async with self._client.post("/generate", self._short_request()):
            pass

    async def _sample(
        self, reply: Reply, request: Mapping[str, Any], *, sent: Version, note_read: Callable[[], None]
    ) -> None:
        late = self._late_tokens if self._has_spans else None
        bounds = self._settled.request(sent)
        try:
            async with self._client.post("/generate", request) as response:
                if not request["stream"]:
                    reply.take_whole(await response.json(), late_tokens=self._late_tokens)
                    self._tokens_generated += len(reply)
                    return
                async for line in lines(response.content):
                    data = line.removeprefix(b"data:").strip()
                    if data and data != b"[DONE]":
                        before = len(reply)
                        stamp = reply.take_chunk(json.loads(data), newest=bounds.newest, late_tokens=late)
                        if len(reply) > before:
                            note_read()
                            self._tokens_generated += len(reply) - before
                            bounds.note_token()
                            self._settled.note_stamp(stamp)
        except asyncio.CancelledError:
            await self._client.abort(request["rid"])  # the server would notice the closed connection seconds later
            raise


def static_share(num_bytes: int, *, free: int) -> float:
    """Return the share of the ``free`` bytes that SGLang takes for weights and cache, of ``num_bytes`` for an engine.

    A learner that trains keeps more than one that has just started. A server that is started again beside it gets a
    smaller cache, not a smaller workspace: a load of weights would not fit.
    """
    static = min(num_bytes - _WORKSPACE_BYTES, free - _LEAST_WORKSPACE_BYTES)
    return round(min(0.95, max(0.01, static / max(1, free))), 3)


def _has_own_share(options: Options) -> bool:
    return "mem-fraction-static" in options.server_arguments
