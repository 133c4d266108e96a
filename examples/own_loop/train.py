"""A loop of your own on hftune's batches: torchrun --nproc_per_node 2 train.py prints the losses of python train.py."""

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

import hftune

torch.manual_seed(0)
texts = [torch.randint(1, 50, (length,)) for length in torch.randint(4, 40, (100,)).tolist()]
model = torch.nn.Sequential(torch.nn.Embedding(50, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 50))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, optimizer)
plan = hftune.BatchPlan(len(texts), batch_size=16, micro_batch_size=4)
done, num_steps = 0, 2 * plan.num_steps  # after a restart, done is the number of steps that your checkpoint has behind it


def collate(samples):
    return pad_sequence(samples, batch_first=True)


def num_items(ids):
    return int((ids[:, 1:] != 0).sum())  # what the loss below sums over


for batch in hftune.batches(plan, texts, collate, accelerator, num_items, range(done, num_steps)):
    total = torch.zeros((), device=accelerator.device)
    for ids in batch.micro_batches(model):
        logits = model(ids[:, :-1]).transpose(1, 2)
        loss = batch.weight * cross_entropy(logits, ids[:, 1:], ignore_index=0, reduction="sum")
        accelerator.backward(loss)
        total += loss.detach()
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {batch.step + 1}/{num_steps}  loss {batch.mean(total):.7f}")
