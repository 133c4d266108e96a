"""The tasks that come with hftune. A bare ``task.type`` is looked up here."""

from hftune.tasks.audio_classification import AudioClassification
from hftune.tasks.chats import Chats
from hftune.tasks.embeddings import Embeddings
from hftune.tasks.image_classification import ImageClassification
from hftune.tasks.image_restoration import ImageRestoration
from hftune.tasks.kto import KTO
from hftune.tasks.language_modeling import LanguageModeling
from hftune.tasks.masked_language_modeling import MaskedLanguageModeling
from hftune.tasks.multiple_choice import MultipleChoice
from hftune.tasks.object_detection import ObjectDetection
from hftune.tasks.preferences import Preferences
from hftune.tasks.process_reward import ProcessReward
from hftune.tasks.question_answering import QuestionAnswering
from hftune.tasks.reranking import Reranking
from hftune.tasks.reward_model import RewardModel
from hftune.tasks.semantic_segmentation import SemanticSegmentation
from hftune.tasks.seq2seq import Seq2Seq
from hftune.tasks.sequence_classification import SequenceClassification
from hftune.tasks.speech_recognition import SpeechRecognition, SpeechToText
from hftune.tasks.title_generation import TitleGeneration
from hftune.tasks.token_classification import TokenClassification
from hftune.tasks.vision_chats import VisionChats

__all__ = [
    "KTO",
    "AudioClassification",
    "Chats",
    "Embeddings",
    "ImageClassification",
    "ImageRestoration",
    "LanguageModeling",
    "MaskedLanguageModeling",
    "MultipleChoice",
    "ObjectDetection",
    "Preferences",
    "ProcessReward",
    "QuestionAnswering",
    "Reranking",
    "RewardModel",
    "SemanticSegmentation",
    "Seq2Seq",
    "SequenceClassification",
    "SpeechRecognition",
    "SpeechToText",
    "TitleGeneration",
    "TokenClassification",
    "VisionChats",
]
