"""TRL's own trainer on this service's scores, and TRL's own divergence beside this project's."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl.experimental.server_distillation import ServerDistillationConfig, ServerDistillationTrainer

from deployments.trainers.trl import TeacherClient
from scoring.divergence import forward_kl, student_scores, token_mean
from scoring.errors import InvalidRead
from tests.golden_jsd import batch, trl_losses
from tests.oracle import hf_logprobs

V = 2048


@pytest.fixture
def teacher(service):
    return TeacherClient(service.url)


def expected(model, ids, start):
    """float32 [R, V]: what the teacher says at the completion's positions, by Hugging Face."""
    return hf_logprobs(model, ids)[start - 1 : -1]


def test_the_golden_numbers_are_still_what_trl_says():
    golden = json.loads((Path(__file__).parent.parent / "golden_jsd.json").read_text())
    assert {name: golden[name] for name in batch()} == batch()
    for beta, due in trl_losses(batch()).items():
        np.testing.assert_allclose(golden["losses"][beta]["value"], due["value"], rtol=1e-12)
        np.testing.assert_allclose(golden["losses"][beta]["gradient"], due["gradient"], atol=1e-14)


def test_the_client_answers_as_trls_own_does(teacher, tiny_model):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, V, n).tolist() for n in (9, 14, 6)]
    prompts = [4, 1, 6]  # the last has no completion
    answer = teacher.get_sequence_logprobs(sequences, prompts, top_logprobs=5, chunk_size=2, max_concurrent_requests=1)
    assert sorted(answer) == ["actual_logprobs", "actual_token_ids", "logprob_token_ids", "logprobs"]
    for i, (ids, start) in enumerate(zip(sequences, prompts, strict=True)):
        due = expected(tiny_model, ids, start)
        best = due.topk(5)
        assert [len(answer[name][i]) for name in answer] == [len(ids) - start] * 4
        assert answer["actual_token_ids"][i] == [[token] for token in ids[start:]]
        assert answer["logprob_token_ids"][i] == best.indices.tolist()
        if len(due):
            np.testing.assert_allclose(answer["logprobs"][i], best.values, atol=3e-5)
            own = due.gather(1, torch.tensor(ids[start:])[:, None])
            np.testing.assert_allclose(answer["actual_logprobs"][i], own, atol=3e-5)
    with pytest.raises(InvalidRead, match=r"temperature: is 0\.7"):
        teacher.get_sequence_logprobs(sequences, prompts, temperature=0.7)


def test_trls_loss_on_these_scores_is_the_bucket_divergence(teacher, tiny_model):
    """Right-padded completions of 2 and 4 tokens after prompts of 3, through TRL's own alignment and loss."""
    k, rng = 8, np.random.default_rng(1)
    input_ids = torch.tensor(rng.integers(0, V, (2, 7)))
    attention_mask = torch.tensor([[1] * 5 + [0] * 2, [1] * 7])
    labels = torch.where(attention_mask.bool(), input_ids, -100)
    labels[:, :3] = -100
    trainer = SimpleNamespace(teacher_client=teacher, loss_top_k=k, temperature=1.0, loss_add_tail=True)
    trainer._reduce_divergence_loss = ServerDistillationTrainer._reduce_divergence_loss
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    theirs = ServerDistillationTrainer._get_teacher_token_logprobs_from_server(trainer, inputs, 3)
    mask = labels[:, 3:] != -100
    for i, length in enumerate((5, 7)):
        ids = input_ids[i, :length].tolist()
        own = expected(tiny_model, ids, 3).gather(1, input_ids[i, 3:length][:, None]).squeeze(1)
        np.testing.assert_allclose(theirs["actual_logprobs"][i][mask[i]], own, atol=3e-5)
    gradients, losses = [], []
    for by_trl in (True, False):
        logits = torch.tensor(np.random.default_rng(2).normal(size=(2, 4, V)), dtype=torch.float32, requires_grad=True)
        if by_trl:
            loss = ServerDistillationTrainer._compute_server_forward_kl_loss(
                trainer, theirs, logits.log_softmax(-1), labels[:, 3:]
            )
        else:
            student = student_scores(logits, theirs["topk_token_ids"], mask=mask)
            rest = torch.log(-torch.expm1(theirs["topk_logprobs"].logsumexp(-1)))
            values = forward_kl(
                student.logprobs, theirs["topk_logprobs"], theirs["topk_token_ids"], mask=mask,
                student_tail=student.tail_logprob, teacher_tail=rest,
            )  # fmt: skip
            loss = token_mean(values, mask, int(mask.sum()))
        loss.backward()
        losses.append(loss.item())
        gradients.append(logits.grad)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-6, rtol=1e-4)
    assert gradients[1].abs().max() > 1e-4


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, 4), (1.0, 1)], ids=["forward KL", "reverse KL"])
def test_trls_trainer_trains_on_this_service(service, tiny_model, tmp_path, beta, top_k):
    """The lines of the drop-in, with TRL's own generation and optimisation; every score it asked for was right."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(2000)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="w1")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=V, num_key_value_heads=1, head_dim=16, eos_token_id=1, **shape))
    prompts = ["w5 w6 w7", "w8 w9 w10 w11 w12"]
    args = ServerDistillationConfig(
        output_dir=str(tmp_path), teacher_model_server_url=service.url, beta=beta, loss_top_k=top_k, use_cpu=True,
        bf16=False, report_to="none", save_strategy="no", logging_steps=1, per_device_train_batch_size=2, max_steps=2,
        max_completion_length=12, learning_rate=1e-3,
    )  # fmt: skip
    trainer = ServerDistillationTrainer(
        model, args, train_dataset=Dataset.from_list([{"prompt": p} for p in prompts]), processing_class=tokenizer
    )
    trainer.teacher_client = TeacherClient(service.url)
    asked = []

    def ask(**request):
        asked.append((request, TeacherClient.get_sequence_logprobs(trainer.teacher_client, **request)))
        return asked[-1][1]

    trainer.teacher_client.get_sequence_logprobs = ask
    before = [p.detach().clone() for p in model.parameters()]
    trainer.train()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    logged = [record for record in trainer.state.log_history if "grad_norm" in record]
    assert len(logged) == 2 and all(math.isfinite(r["loss"]) and 0 < r["grad_norm"] < 1e4 for r in logged)
    assert len(asked) == 2
    for request, answer in asked:
        for i, (ids, start) in enumerate(zip(request["sequences"], request["prompt_lengths"], strict=True)):
            own = expected(tiny_model, ids, start).gather(1, torch.tensor(ids[start:])[:, None])
            np.testing.assert_allclose(answer["actual_logprobs"][i], own, atol=3e-5)
