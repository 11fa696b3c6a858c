"""Fine-tuning a model of the shape of GPT-2 XL, with exact attention and with nearfield (paper, Experiments on LLMs)."""

from experiments.experiment import Experiment
from experiments.gpt2_xl.draw import draw
from experiments.gpt2_xl.plan import keep, plan
from experiments.gpt2_xl.tell import tell

EXPERIMENT = Experiment("gpt2-xl", "Fine-tuning GPT-2 XL", plan, draw, tell, keep, devices=("cuda", "cpu"))
