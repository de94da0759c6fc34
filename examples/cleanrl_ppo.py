"""Proximal policy optimization in one file, on forked copies, for discrete actions and flat observations.

    pip install prized-gym torch
    python examples/cleanrl_ppo.py
    python examples/cleanrl_ppo.py --env Acrobot-v1 --fork-on episode

In the style of CleanRL: read it top to bottom, there is nothing behind it. To run CleanRL's own scripts on forked copies, see
`prized_gym.integrations.cleanrl.LegacyInfo`.
"""

import argparse
import time

import numpy as np
import torch
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn
from torch.distributions import Categorical

import prized_gym


class Agent(nn.Module):
    """A policy and a value function."""

    def __init__(self, observation_size: int, actions: int) -> None:
        super().__init__()
        self.policy = nn.Sequential(
            nn.Linear(observation_size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, actions)
        )
        self.value = nn.Sequential(
            nn.Linear(observation_size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        for network, scale in ((self.policy, 0.01), (self.value, 1.0)):
            for layer in network:
                if isinstance(layer, nn.Linear):
                    nn.init.orthogonal_(layer.weight, 2**0.5)
                    nn.init.zeros_(layer.bias)
            nn.init.orthogonal_(network[-1].weight, scale)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1", help="the id of a Gymnasium environment")
    parser.add_argument("--copies", type=int, default=8, help="how many copies to step at a time")
    parser.add_argument("--steps", type=int, default=40_000, help="how many steps to train, over all copies")
    parser.add_argument("--fork-on", choices=["reset", "episode", "start"], default="reset")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rollout", type=int, default=64, help="steps of each copy between updates")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--gamma", type=float, default=0.98)
    parser.add_argument("--gae-lambda", type=float, default=0.9)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--entropy", type=float, default=0.0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    torch.set_num_threads(1)

    # Same-step: the observation of a step that ends an episode is the next episode's first; the last one is in infos.
    forked = prized_gym.ForkedVectorEnv(args.env, args.copies, autoreset_mode="SameStep", fork_on=args.fork_on)
    envs = RecordEpisodeStatistics(forked)
    size = int(np.prod(envs.single_observation_space.shape))
    agent = Agent(size, int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.rollout, args.copies)
    observations = torch.zeros(*shape, size)
    actions = torch.zeros(shape, dtype=torch.int64)
    log_probs, rewards, values = torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)
    # The value of what came after each step: 0 after an end, that of the last observation after a cut.
    following, ended = torch.zeros(shape), torch.zeros(shape)

    returns: list[float] = []
    started = time.perf_counter()
    first, _ = envs.reset(seed=args.seed)
    observation = torch.as_tensor(first.reshape(args.copies, -1), dtype=torch.float32)
    updates = max(1, args.steps // (args.rollout * args.copies))
    for update in range(updates):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * (1 - update / updates)

        with torch.no_grad():
            for step in range(args.rollout):
                distribution = Categorical(logits=agent.policy(observation))
                action = distribution.sample()
                observations[step], actions[step] = observation, action
                log_probs[step], values[step] = distribution.log_prob(action), agent.value(observation).squeeze(-1)

                batch, reward, terminated, truncated, infos = envs.step(action.numpy())
                observation = torch.as_tensor(batch.reshape(args.copies, -1), dtype=torch.float32)
                rewards[step] = torch.as_tensor(reward, dtype=torch.float32)
                ended[step] = torch.as_tensor(terminated | truncated, dtype=torch.float32)
                following[step] = agent.value(observation).squeeze(-1)
                for copy in np.flatnonzero(terminated | truncated):
                    last = torch.as_tensor(infos["final_obs"][copy].ravel(), dtype=torch.float32)
                    following[step, copy] = 0.0 if terminated[copy] else agent.value(last).squeeze(-1)
                    returns.append(float(infos["episode"]["r"][copy]))

            advantages = torch.zeros(shape)
            running = torch.zeros(args.copies)
            for step in reversed(range(args.rollout)):
                delta = rewards[step] + args.gamma * following[step] - values[step]
                running = delta + args.gamma * args.gae_lambda * (1 - ended[step]) * running
                advantages[step] = running
            targets = (advantages + values).flatten()

        flat = observations.reshape(-1, size), actions.flatten(), log_probs.flatten(), advantages.flatten()
        for _ in range(args.epochs):
            for chosen in torch.randperm(len(targets)).chunk(args.minibatches):
                seen, taken, old, advantage = (part[chosen] for part in flat)
                distribution = Categorical(logits=agent.policy(seen))
                ratio = (distribution.log_prob(taken) - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gain = torch.minimum(ratio * advantage, ratio.clamp(1 - args.clip, 1 + args.clip) * advantage)
                error = (agent.value(seen).squeeze(-1) - targets[chosen]) ** 2
                loss = -gain.mean() + 0.5 * error.mean() - args.entropy * distribution.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()

        if returns and (update % 10 == 9 or update == updates - 1):
            done = (update + 1) * args.rollout * args.copies
            rate = done / (time.perf_counter() - started)
            print(
                f"{done:7d} steps  mean return of the last 20 episodes {np.mean(returns[-20:]):6.1f}  {rate:6.0f} steps/s"
            )

    if returns:
        print(f"{len(returns)} episodes; the last 20 had a mean return of {np.mean(returns[-20:]):.1f}")
    envs.close()
