/* What a recorded forward calls of the other files: a product, a norm and attention as parts of one run. */

#ifndef HF_SPECDEC_REPLAY_H
#define HF_SPECDEC_REPLAY_H

#include "tiles.h"

#ifdef AVX2
typedef struct {
    const Tiles *tiles;
    const void *tokens, *weights, *bias; /* tokens are (num_tokens, num_in) */
    void *out;
    int64_t num_tokens, num_out, num_in, block;
    int64_t *next; /* the first output that no thread has taken yet */
    int kind, is_transposed, has_no_memory; /* weights are (num_out, num_in), or transposed */
} Product;

typedef struct {
    const Tiles *tiles;
    const char *query, *key, *value;
    const float *mask;  /* added to the scores, (batch, num_queries, num_keys); NULL where nothing is hidden */
    const float *sinks; /* (heads,) scores of a key that adds no value; NULL for none */
    void *out;          /* (batch, num_queries, heads, value_dim) */
    int64_t batch, kv_heads, groups, num_queries, num_keys, dim, value_dim;
    /* Numbers from one row of a batch, head or query to the next; those of a key, value or query are without gaps, and
     * so are the keys of a head. */
    int64_t query_strides[3], key_strides[2], value_strides[3], mask_strides[2];
    const int64_t *packed; /* (batch + 1,) each row's first query in one line, (batch,) keys at its end that it sees none
                              of; NULL where all rows have `num_queries` */
    float scale, cap; /* `cap` times the hyperbolic tangent of a score's share of it is its place; 0 for none */
    int kind, has_no_memory;
    int64_t *next; /* the first group of queries that no thread has taken yet */
} Attention;

/* What one thread does of each; `room` of the product takes its tokens in fp32, where the tiles read them so. */
int64_t product_room(int kind, int64_t num_tokens, int64_t num_in, int is_transposed);
void product_begin(Product *product, int64_t num_threads, float *room);
void product_work(void *product);
void attention_work(void *attention);
void norms(const char *tokens, const void *weights, char *out, int64_t count, int64_t size, float epsilon, int kind);
#endif

#endif
