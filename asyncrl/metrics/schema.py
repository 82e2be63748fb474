"""Name and meaning of every metric. ``*`` stands for a worker, a reward part, or whatever else the entry says.

Metrics are part of the interface: renaming one is a breaking change, and tests fail if a logged metric is not listed
here.
"""

from __future__ import annotations

SCHEMA: dict[str, str] = {
    "staleness/mean": "policy versions between sampling and training, mean over trained tokens",
    "staleness/p50": "median staleness of trained tokens",
    "staleness/p95": "95th percentile of the staleness of trained tokens",
    "staleness/max": "staleness of the oldest token of the batch, masked answers included; never above max_staleness",
    "staleness/histogram": "number of trained tokens by staleness",
    "staleness/min": "staleness of the newest trained token of the batch",
    "staleness/spread": "versions between the oldest and the newest token of an answer, mean over answers",
    "staleness/in_flight": "policy versions that passed while a group was being generated, mean over groups",
    "staleness/in_queue": "policy versions that passed while a group waited to be trained, mean over groups",
    "staleness/weight": "mean loss weight from staleness.weight over trained tokens; only if staleness.weight is set",
    "staleness/window": "groups kept outstanding so that the learner is fed (staleness.admission); at most "
    "(max_staleness + 1) x groups_per_batch",
    "staleness/cancelled": "answers missing from the batch's groups: the longest ones, cut off by "
    "rollout.group_seconds, and failed ones (rollout.min_group)",
    "staleness/failed_samples": "how many of staleness/cancelled failed",
    "staleness/old_trajectories": "trajectories that were too old and trained nothing; with staleness.discard",
    "staleness/old_tokens": 'sampled tokens that were too old and trained nothing; with discard = "tokens"',
    "staleness/dropped_groups": "groups dropped as too stale, since the start of the run",
    "staleness/dropped_share": "share of the answers of the last ten steps (trained or dropped) that were dropped as "
    "too stale",
    "staleness/filtered_groups": "groups rejected by algorithm.filters, since the start of the run",
    "staleness/filtered/*": "those that one filter rejected since the learner started, by FILTER, or FILTER/REASON "
    "if it gave one",
    "staleness/kept_at_cap": "groups kept at algorithm.filter_cap although the filters reject them, since this learner "
    "started",
    "staleness/failed_groups": "groups that could not be made (engine or reward failed for good), since the start of "
    "the run",
    "staleness/failed_share": "share of the answers of the last ten steps (trained or failed) that failed and have no "
    "reward",
    "buffer/groups": "groups that have arrived and wait to be trained",
    "buffer/tokens": "response tokens of these groups",
    "buffer/oldest_seconds": "how long the oldest of these groups has waited",
    "bus/prompts": "prompt groups on the bus, including those in flight at workers",
    "bus/trajectories": "trajectory groups stored in the log",
    "bus/lag": "log entries that the learner has not read yet",
    "learner/incarnation": "incarnation of the learner that trained the step; distinguishes rows of a step that was "
    "trained twice",
    "bus/rejected": "messages rejected by the learner and its workers as malformed or impossible, since they started",
    "metrics/left_out": "rows, samples and alarms that were left out because a sink was slow or failed",
    "learner/step_seconds": "duration of the step, without waiting",
    "learner/elapsed_seconds": "time from the end of the last step to the end of this one, with all waits",
    "learner/rank*/tokens": "tokens that this rank has to compute, prompts included; only with several ranks, for at "
    "most 64",
    "learner/shared_tokens": "share of the batch's tokens, prompts included, that are not computed because another "
    "sequence begins with them (learner.shared_prefixes); absent if nothing is shared",
    "learner/wait_seconds": "time before the step in which the backend was idle: no full batch, or the batch was not "
    "prepared yet",
    "learner/straggler_wait_seconds": "part of wait_seconds spent with a full batch, waiting for groups that would "
    "become too old",
    "learner/export_seconds": "time after the step in which copying the weights for publication blocked the backend",
    "learner/gpus_wait_seconds": "time before the step until the engines had left the GPUs; with run.colocated",
    "learner/onload_seconds": "time before the step to move models and optimizers back to the GPUs",
    "learner/offload_seconds": "time after the previous step to move models and optimizers to the host",
    "learner/rank*/kept_memory_bytes": "GPU memory that torch kept in this rank when it had left its GPU after the "
    "previous step; with run.colocated, megatron only",
    "learner/rank*/used_memory_bytes": "used memory of this rank's GPU at that moment, by all processes, engines "
    "included; with run.colocated, megatron only",
    "learner/checkpoint_seconds": "time that training waited for the checkpoint before the step; absent if none was "
    "started",
    "learner/checkpoint_write_seconds": "time from the start of a checkpoint until it was on disk; steps run at the "
    "same time",
    "learner/load_seconds": "time from the start of the process until it could train; only at the first step of an "
    "incarnation",
    "learner/idle_ratio": "share of the time since the last step spent waiting for data",
    "learner/tokens_per_second": "trained response tokens divided by the time since the last step",
    "learner/mfu": "model FLOP/s utilisation of the step: training FLOPs / seconds / nominal bfloat16 peak; GPU only",
    "learner/step_tokens_per_second": "tokens of the sequences, prompts included, divided by step_seconds; those that "
    "sequences share count in each",
    "learner/expert_load_max": "tokens of the busiest expert divided by the mean over experts, mean over layers; 1 if "
    "all experts are used alike; mixtures of experts on megatron only",
    "learner/experts_unused": "share of experts that no token of the batch was sent to, mean over layers; mixtures of "
    "experts on megatron only",
    "learner/aux_loss": "load-balancing loss of a layer without its coefficient, mean over tokens and layers; 1 if the "
    "routers prefer all experts alike, usually more otherwise; with learner.options.aux_loss_coefficient",
    "learner/draft_loss": "negative log likelihood of the batch's tokens under the model's multi-token-prediction "
    "layers, in nats, mean over trained tokens and layers; with learner.options.draft_coefficient",
    "learner/memory_bytes": "peak GPU memory of tensors on the first rank since the start; GPU only",
    "learner/update_seconds": "part of step_seconds for AdamW on the host, last mini-batch; with "
    'learner.options.optimizer_device = "cpu"',
    "learner/forward_seconds": "part of step_seconds for the forward passes of other models and for advantages",
    "learner/prepare_seconds": "time on the host to pack a batch into micro-batches, usually during the previous step",
    "learner/learning_rate": "learning rate of this step, including warm-up, schedule and staleness.learning_rate",
    "learner/skipped_mini_batches": "skipped optimizer steps of the batch (non-finite loss or gradient); with "
    "learner.steps_per_batch",
    "learner/skipped_steps": "1 if a non-finite loss or gradient skipped the update",
    "rollout/tokens_per_second": "tokens sampled per second since the last step, summed over workers (as of their last "
    "heartbeat, up to 2 s ago)",
    "rollout/idle_ratio": "share of this time in which nothing was decoded, mean over workers",
    "rollout/running": "sequences being decoded",
    "rollout/queued": "sequences waiting for a slot in an engine",
    "rollout/turns_mean": "turns of the model per rollout of the batch; absent if every rollout is one answer",
    "rollout/turns_max": "most turns of the model in a rollout of the batch",
    "length/observed_mean": "tokens of the environment per rollout of the batch; absent as rollout/turns_mean",
    "reward/pass@*": "probability that at least one of k answers of a group has a reward of at least 1, over the "
    "batch's groups (unbiased, as in evaluations)",
    "rollout/support_mean": "tokens that top_p and top_k left to sample from, mean over the batch's sampled tokens; "
    "absent if nothing was cut",
    "rollout/request_seconds": "time of a request to an engine, from its start to its last token, mean over each "
    "worker's last 256 requests and over workers",
    "rollout/longest_request_seconds": "longest of these requests, over workers",
    "rollout/queue_seconds": "part of rollout/request_seconds before the engine began with the request; absent if the "
    "engine does not say (SGLang without enable-metrics)",
    "rollout/first_token_seconds": "part of rollout/request_seconds until the first token, the queue included; absent "
    "as rollout/queue_seconds",
    "rollout/draft_acceptance": "share of the tokens proposed by speculative decoding in these requests that the model "
    "took; absent without any",
    "rollout/cached_prompt_ratio": "share of their prompts' tokens whose keys and values the engine still had; 0 for "
    "an engine that does not report it",
    "rollout/extra_samples": "samples of the batch's groups that were started in addition to group_size and not "
    "trained",
    "rollout/resumed_tokens": "tokens of partial rollouts that workers resumed from other workers, since they started",
    "rollout/discarded_tokens": "tokens of partial rollouts that were not resumed: too old, or not requested again",
    "rollout/unsaved_tokens": "tokens in progress that are not saved to the bus; they would be lost if their workers "
    "died now",
    "rollout/*/*": "a metric of rollout/ for one worker",
    "rollout/workers": "live workers",
    "rollout/joined": "live workers that `asyncrl run` did not start, according to their names",
    "rollout/quarantined": "quarantined workers, whose groups are dropped (learner.quarantine_mismatch)",
    "weights/version": "newest policy version",
    "weights/publish_seconds": "time from the end of the step to the announcement that engines may load the version",
    "weights/publish_bytes": "bytes stored for the last stored version: a file, or objects (whole, changes, or both)",
    "weights/pause_seconds": "longest time that an engine decoded nothing during its last load, over engines",
    "weights/lag_versions": "newest version - version of an engine at its last heartbeat (up to 2 s ago), largest over "
    "engines",
    "weights/*/*": "a metric of weights/ for the engine of one worker",
    "offpolicy/ess": "effective sample size of the correction's weights, as a share of the tokens; 1 without a "
    "correction",
    "offpolicy/k1": "estimate of KL(behavior || trainer) per token, nats; unbiased, may be negative",
    "offpolicy/k3": "estimate of KL(behavior || trainer) per token, nats; never negative",
    "offpolicy/drift": "k3 / (entropy + 0.01); over 0.4 the tokens are too old for the learning rate (alarm drift)",
    "offpolicy/ratio_max": "largest trainer / behavior probability ratio",
    "offpolicy/clip_fraction": "share of tokens whose gradient the PPO clip stopped",
    "offpolicy/truncated_fraction": "share of tokens whose correction weight is capped below their ratio",
    "offpolicy/entropy": "entropy per token estimated from the samples, nats; far from entropy if the samples miss "
    "much of it",
    "offpolicy/masked_fraction": "share of tokens whose correction weight is 0",
    "offpolicy/ess_count": "offpolicy/ess as a number of tokens",
    "offpolicy/sequence_ess": "effective sample size of the untruncated sequence ratios, as a share of the sequences",
    "offpolicy/sequence_ess_count": "offpolicy/sequence_ess as a number of sequences",
    "offpolicy/sequence_ratio_max": "largest trainer / behavior probability ratio of a whole answer",
    "offpolicy/masked_sequences": "share of answers of which the correction rejects every token",
    "offpolicy/ratio_min": "smallest trainer / behavior probability ratio",
    "offpolicy/chi2_token": "mean squared ratio - 1: the variance of an untruncated weight, per token",
    "offpolicy/chi2_sequence": "mean squared ratio - 1 of whole answers",
    "offpolicy/k3_reverse": "estimate of KL(trainer || behavior) per token, nats",
    "offpolicy/js": "Jensen-Shannon divergence of trainer and behavior per token, nats",
    "offpolicy/perplexity_*": "perplexity of whole answers under trainer and behavior, and their ratio; means over "
    "answers",
    "offpolicy/nll_*": "negative log-likelihood per token of whole answers under trainer and behavior, and their "
    "difference",
    "offpolicy/staleness_*/*": "these metrics for tokens of one range of staleness: 0, 1, 2-3, 4-7, 8-15, 16 and more",
    "mismatch/ratio_error": "mean exp |trainer - behavior logprob|; 1 if they are equal",
    "mismatch/mean": "mean |trainer - behavior logprob| over trained tokens, from staleness and engine numerics",
    "mismatch/max": "maximum |trainer - behavior logprob| over trained tokens",
    "mismatch/fresh_mean": "mismatch/mean over trajectories sampled entirely by the version being trained: engine "
    "numerics only",
    "mismatch/fresh_max": "maximum over these trajectories",
    "mismatch/fresh_k3": "k3 over the tokens of these trajectories",
    "mismatch/*/mean": "mismatch of a worker's answers in the last check (learner.logprob_check_every), nats per token",
    "mismatch/routing_replayed": "mean |trainer - behavior logprob| of checked answers of a mixture of experts, with "
    "routing replay",
    "mismatch/routing_replayed_k3": "k3 over these tokens",
    "mismatch/routing_own": "mismatch/routing_replayed with the trainer's own choice of experts; the difference is the "
    "gain of replay",
    "mismatch/routing_own_k3": "k3 over these tokens",
    "mismatch/alarm": "1 if mismatch/fresh_mean exceeds metrics.mismatch_alarm",
    "reward/mean": "mean reward over the batch's trajectories",
    "reward/std": "standard deviation of the reward over the batch's trajectories",
    "advantage/mean": "mean advantage over the batch's trained tokens, as the loss gets it; about 0 if whitened",
    "advantage/std": "standard deviation of the advantage over the batch's trained tokens; about 1 if whitened",
    "reward/same_in_group": "share of groups whose rewards are all equal; they train nothing",
    "reward/*": "mean of a part that the reward function reports; for category/NAME the share of answers that it says "
    "are of this category",
    "evaluation/complete": "1 if every prompt of every data set was answered; 0: the means leave some prompts out",
    "evaluation/lag_steps": "steps by which the learner was ahead of the evaluated version when the evaluation ended",
    "evaluation/seconds": "time from the first prompt to the last answer",
    "evaluation/tokens": "tokens sampled for the evaluation",
    "evaluation/engine_share": "share of engine time: seconds for which workers held the version, divided by seconds x "
    "engines",
    "evaluation/time": "end of the evaluation, in Unix seconds",
    "evaluation/mixed": "groups of answers discarded because some tokens were not sampled by the evaluated version",
    "evaluation/skipped": "evaluations that were due while another one was in progress, since the start",
    "evaluation/*/prompts": "prompts of a data set, or of DATASET[TAG], that were asked",
    "evaluation/*/missing": "prompts without answers; they are in no mean",
    "evaluation/*/mean@*": "reward, mean over prompts and their n answers",
    "evaluation/*/pass@*": "probability that at least one of k answers is solved, unbiased",
    "evaluation/*/pass^*": "probability that all of k answers are solved, unbiased",
    "evaluation/*/majority@*": "share of prompts whose most frequent answer is solved",
    "evaluation/*/low": "lower bound of a metric: 95 % bootstrap interval over resampled prompts",
    "evaluation/*/high": "upper bound of this interval",
    "evaluation/*/length_mean": "mean number of tokens of an answer",
    "evaluation/*/truncated_fraction": "share of answers truncated at max_new_tokens",
    "length/generated": "histogram of tokens per rollout (all its parts), over rollouts that arrived since the last "
    "step",
    "length/trained": "histogram of tokens per rollout (all its parts), over the batch",
    "length/trained_mean": "mean number of tokens per rollout of the batch",
    "length/solved_mean": "mean number of tokens of the batch's rollouts with a reward of at least 1; absent without "
    "any",
    "length/solved_max": "tokens of the longest of these rollouts",
    "length/parts_mean": "mean number of trajectories per rollout; 1 unless a rollout function returns several",
    "length/trained_tokens": "response tokens that the step trains; 0 if algorithm.mask_truncated masks every answer",
    "length/truncated_fraction": "share of rollouts truncated at max_new_tokens",
    "length/dropped": "histogram of tokens per rollout, over rollouts dropped as stale since the last step",
    "length/dropped_mean": "mean number of tokens of these rollouts; absent if there are none",
    "data/epoch": "pass over the data of the newest trained prompt",
    "data/overlong_prompts": "prompts dropped because they exceed max_prompt_tokens, since the start",
    "cost/gpu_seconds": "GPUs of learner, live workers and servers, times the time since the last step; a process "
    "without a GPU counts as one",
    "cost/gpu_seconds_per_token": "cost/gpu_seconds per token that the step trains; `asyncrl bill` says what for",
    "time": "end of the step, in Unix seconds",
    "alarm/*": "1 while the learner's alarm of this name is on, otherwise absent",
    "loss": "loss of the batch, without entropy and KL; for sft the cross-entropy, nats per response token",
    "grad_norm": "gradient norm before clipping",
    "entropy": "entropy of the policy at the sampled tokens, nats, mean over trained tokens",
    "critic/grad_norm": "gradient norm of the critic before clipping",
    "critic/learning_rate": "learning rate of the critic in this step",
    "critic/skipped_steps": "1 if a non-finite loss or gradient skipped the critic's update",
    "critic/skipped_mini_batches": "skipped optimizer steps of the critic on the batch (non-finite loss or gradient)",
    "critic/loss": "value loss of the batch",
    "critic/explained_variance": "1 - Var(returns - values) / Var(returns) over trained tokens, at most 1",
    "critic/clip_fraction": "share of tokens whose value was limited by the clip",
    "critic/moved_fraction": "share of tokens whose value moved further than the clip from its old value",
    "critic/value_mean": "mean value over trained tokens",
    "critic/return_mean": "mean return (target of the values) over trained tokens",
    "kl": "k3 to the reference model per token, nats; only with a reference",
    "teacher_kl": "k3 to the teacher per token, nats; only with a teacher",
}
