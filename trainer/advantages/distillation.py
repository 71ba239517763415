"""On-policy distillation: a teacher grades every token that the student sampled. B samples, R response tokens.

Sources: https://thinkingmachines.ai/blog/on-policy-distillation (2025); GKD, arXiv 2306.13649.
"""

from trainer.advantages.groups import group_deviations
from trainer.advantages.types import AdvantageInputs, AdvantageOptions, AdvantageOutputs


def distillation(inputs: AdvantageInputs, options: AdvantageOptions) -> AdvantageOutputs:
    """A_t = log p_teacher - log p_student + w (R - mean_g) on every counted token; returns = A.

    The first part is minus the sampled reverse KL of this token alone (discount 0): a token that the teacher finds
    likelier than the student does is made likelier. The student is the weights that the step begins with, the teacher
    the reference service. w = reward_weight adds the task's own reward; a group of one has mean 0. Leaves out GKD's
    other divergences, which need whole distributions. Reports the mean reverse KL as `teacher_kl`, nats per token.
    Raises ValueError without logprobs of either.
    """
    if inputs.logprobs_BR is None or inputs.reference_logprobs_BR is None:
        raise ValueError("distillation needs the student's logprobs and the teacher's: serve it as the reference")
    mask_BR = inputs.mask_BR
    grades_BR = (inputs.reference_logprobs_BR - inputs.logprobs_BR) * mask_BR
    scores_B = inputs.token_rewards_BR.sum(-1)
    task_B = options.reward_weight * group_deviations(scores_B, inputs.group_B).from_mean(scores_B)
    advantages_BR = grades_BR + task_B[:, None] * mask_BR
    metrics = {"teacher_kl": -float(grades_BR.sum() / mask_BR.sum().clamp(min=1))}
    return AdvantageOutputs(advantages_BR=advantages_BR, returns_BR=advantages_BR, metrics=metrics)
