"""The paths of an engine that pools."""

from jaxllm.openai.pooling.classify import Classification, ClassificationRequest
from jaxllm.openai.pooling.cohere import CohereEmbeddings, CohereEmbedRequest
from jaxllm.openai.pooling.embeddings import EmbeddingRequest, Embeddings, Pooled, PoolRequest
from jaxllm.openai.pooling.fields import PoolingRequest
from jaxllm.openai.pooling.score import Reranked, RerankRequest, ScoreRequest, Scores

# Path -> the type of its requests, that of its answers, and what it is.
POOLING_PATHS: dict[str, tuple[type[PoolingRequest], type, str]] = {
    "/v1/embeddings": (EmbeddingRequest, Embeddings, "The embeddings of texts"),
    "/pooling": (PoolRequest, Pooled, "Vectors at every token, or what a task names"),
    "/classify": (ClassificationRequest, Classification, "The classes of texts"),
    "/score": (ScoreRequest, Scores, "How well texts go together"),
    "/v1/score": (ScoreRequest, Scores, "The same"),
    "/rerank": (RerankRequest, Reranked, "Documents, ordered by how well they fit a query"),
    "/v1/rerank": (RerankRequest, Reranked, "The same"),
    "/v2/rerank": (RerankRequest, Reranked, "The same"),
    "/v2/embed": (CohereEmbedRequest, CohereEmbeddings, "Embeddings, in Cohere's protocol"),
}
