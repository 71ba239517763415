"""One reward function per file; FUNCTIONS is the whole registry: the name in a config -> its RewardSpec."""

from reward.function import RewardSpec
from reward.functions import arithmetic, even_words, format, gsm8k, length

FUNCTIONS: dict[str, RewardSpec] = {
    spec.name: spec
    for spec in (gsm8k.STRICT, gsm8k.FLEXIBLE, arithmetic.SPEC, format.SPEC, length.SPEC, even_words.SPEC)
}
