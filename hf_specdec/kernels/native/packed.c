/* Linear layers with packed weights, and rows of packed embeddings: see packed.h. For x86 with AVX2; elsewhere
 * `has_kernels` says that there are none. */

#include "packed.h"

#include "core.h"
#include "halves.h"

#ifdef AVX2
#include <math.h>
#include <stdlib.h>

#define ALWAYS __attribute__((always_inline))

enum { EIGHT = 8, TOKENS_AT_ONCE = 256, AHEAD = 2048 };

/* Bytes of a block's codes, and of its scales, for 16 rows. */
static inline int code_bytes_of(int format) { return format == Q8_0 ? 512 : format == Q6_K ? 384 : 256; }
static inline int scale_bytes_of(int format) {
    return format == Q4_1 ? 64 : format == Q4_K ? 40 : format == Q6_K ? 36 : 32;
}

/* What is taken from a code, where it is the same for all. */
static inline int offset_of(int format) { return format == Q8_0 ? 128 : format == Q4_0 ? 8 : format == Q6_K ? 32 : 0; }

typedef void PackedTile(const uint8_t *codes, const uint8_t *scales, const TokenBlock *tokens, int64_t num_blocks,
                        int64_t ahead, float *sums);

/* Tiles of 1, 2, ... tokens. */
typedef struct {
    int most, eight_offset; /* most tokens of a tile; what is taken from a code of Q8_0 by `starts` */
    PackedTile *const (*tiles)[EIGHT];
} PackedTiles;

#define DEFINE_TILE(TARGET_, format_, count_, name_)                                                                   \
    TARGET_ static void name_##_##format_##_##count_(const uint8_t *codes, const uint8_t *scales,                      \
                                                     const TokenBlock *tokens, int64_t num_blocks, int64_t ahead,      \
                                                     float *sums) {                                                    \
        for (int first = 0; first < GROUP; first += LANES)                                                             \
            NAMED(tile)(format_, count_, codes, scales, tokens, num_blocks, ahead, first, sums);                       \
    }
#define DEFINE_FOUR(TARGET_, format_, name_)                                                                           \
    DEFINE_TILE(TARGET_, format_, 1, name_)                                                                            \
    DEFINE_TILE(TARGET_, format_, 2, name_)                                                                            \
    DEFINE_TILE(TARGET_, format_, 3, name_)                                                                            \
    DEFINE_TILE(TARGET_, format_, 4, name_)
#define DEFINE_EIGHT(TARGET_, format_, name_)                                                                          \
    DEFINE_FOUR(TARGET_, format_, name_)                                                                               \
    DEFINE_TILE(TARGET_, format_, 5, name_)                                                                            \
    DEFINE_TILE(TARGET_, format_, 6, name_)                                                                            \
    DEFINE_TILE(TARGET_, format_, 7, name_)                                                                            \
    DEFINE_TILE(TARGET_, format_, 8, name_)
#define FOUR(format_, name_) name_##_##format_##_1, name_##_##format_##_2, name_##_##format_##_3, name_##_##format_##_4
#define EIGHT_MORE(format_, name_)                                                                                     \
    name_##_##format_##_5, name_##_##format_##_6, name_##_##format_##_7, name_##_##format_##_8

/* AVX2: pairs of products are added up in 16 bits, which those of Q8_0 may leave unless their signs are the tokens'. */
#define TARGET AVX2
#define NAMED(name_) name_##_avx2
#define LANES 8
#define MOST 4
#define Integers __m256i
#define Floats __m256
#define codes_at(address_) _mm256_loadu_si256((const __m256i *)(address_))
#define halves_at(address_) fp16_256((const uint16_t *)(address_))
#define bytes_at(address_) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(address_))))
#define signed_at(address_) _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(address_))))
#define all(number_) _mm256_set1_epi32(number_)
#define low_bits(codes_, mask_) _mm256_and_si256(codes_, _mm256_set1_epi8(mask_))
#define either(one_, other_) _mm256_or_si256(one_, other_)
#define moved_down(codes_, bits_) _mm256_srli_epi16(codes_, bits_)
#define moved_up(codes_, bits_) _mm256_slli_epi16(codes_, bits_)
#define floats_of(numbers_) _mm256_cvtepi32_ps(numbers_)
#define same(number_) _mm256_set1_ps(number_)
#define multiply(one_, other_) _mm256_mul_ps(one_, other_)
#define add_multiplied(sum_, one_, other_) _mm256_fmadd_ps(one_, other_, sum_)
#define put_floats(address_, numbers_) _mm256_storeu_ps(address_, numbers_)
AVX2 static inline __m256i fours(const int8_t *tokens) {
    return _mm256_castps_si256(_mm256_broadcast_ss((const float *)tokens));
}
AVX2 static inline __m256i add_pairs(__m256i sums, __m256i pairs) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
AVX2 static inline __m256i add_products_avx2(__m256i sums, __m256i weights, const int8_t *tokens) {
    return add_pairs(sums, _mm256_maddubs_epi16(weights, fours(tokens)));
}
AVX2 static inline __m256i add_eight_bits_avx2(__m256i sums, __m256i weights, const int8_t *tokens) {
    __m256i codes = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
    return add_pairs(sums, _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(fours(tokens), codes)));
}
#define add_products add_products_avx2
#define add_eight_bits add_eight_bits_avx2
#include "packed_tiles.h"

DEFINE_FOUR(AVX2, Q8_0, avx2)
DEFINE_FOUR(AVX2, Q4_0, avx2)
DEFINE_FOUR(AVX2, Q4_1, avx2)
DEFINE_FOUR(AVX2, Q4_K, avx2)
DEFINE_FOUR(AVX2, Q6_K, avx2)
static PackedTile *const avx2_tiles[NUM_FORMATS][EIGHT] = {
    {FOUR(Q8_0, avx2)}, {FOUR(Q4_0, avx2)}, {FOUR(Q4_1, avx2)}, {FOUR(Q4_K, avx2)}, {FOUR(Q6_K, avx2)},
};
static const PackedTiles avx2_set = {MOST, 0, avx2_tiles};

#undef TARGET
#undef NAMED
#undef LANES
#undef MOST
#undef Integers
#undef Floats
#undef codes_at
#undef halves_at
#undef bytes_at
#undef signed_at
#undef all
#undef low_bits
#undef either
#undef moved_down
#undef moved_up
#undef floats_of
#undef same
#undef multiply
#undef add_multiplied
#undef put_floats
#undef add_products
#undef add_eight_bits

/* AVX-512 with VNNI. */
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,fma,f16c")))
#define TARGET VNNI
#define NAMED(name_) name_##_vnni
#define LANES 16
#define MOST 8
#define Integers __m512i
#define Floats __m512
#define codes_at(address_) _mm512_loadu_si512(address_)
#define halves_at(address_) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(address_)))
#define bytes_at(address_) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(address_))))
#define signed_at(address_) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(address_))))
#define all(number_) _mm512_set1_epi32(number_)
#define low_bits(codes_, mask_) _mm512_and_si512(codes_, _mm512_set1_epi8(mask_))
#define either(one_, other_) _mm512_or_si512(one_, other_)
#define moved_down(codes_, bits_) _mm512_srli_epi16(codes_, bits_)
#define moved_up(codes_, bits_) _mm512_slli_epi16(codes_, bits_)
#define floats_of(numbers_) _mm512_cvtepi32_ps(numbers_)
#define same(number_) _mm512_set1_ps(number_)
#define multiply(one_, other_) _mm512_mul_ps(one_, other_)
#define add_multiplied(sum_, one_, other_) _mm512_fmadd_ps(one_, other_, sum_)
#define put_floats(address_, numbers_) _mm512_storeu_ps(address_, numbers_)
/* Written out, as compilers load the token's bytes into a register first, which takes a third longer. */
VNNI static inline __m512i add_products_vnni(__m512i sums, __m512i weights, const int8_t *tokens) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(weights), "m"(*(const int32_t *)tokens));
    return sums;
}
#define add_products add_products_vnni
#define add_eight_bits add_products_vnni
#include "packed_tiles.h"

DEFINE_EIGHT(VNNI, Q8_0, vnni)
DEFINE_EIGHT(VNNI, Q4_0, vnni)
DEFINE_EIGHT(VNNI, Q4_1, vnni)
DEFINE_EIGHT(VNNI, Q4_K, vnni)
DEFINE_EIGHT(VNNI, Q6_K, vnni)
static PackedTile *const vnni_tiles[NUM_FORMATS][EIGHT] = {
    {FOUR(Q8_0, vnni), EIGHT_MORE(Q8_0, vnni)}, {FOUR(Q4_0, vnni), EIGHT_MORE(Q4_0, vnni)},
    {FOUR(Q4_1, vnni), EIGHT_MORE(Q4_1, vnni)}, {FOUR(Q4_K, vnni), EIGHT_MORE(Q4_K, vnni)},
    {FOUR(Q6_K, vnni), EIGHT_MORE(Q6_K, vnni)},
};
static const PackedTiles vnni_set = {MOST, 128, vnni_tiles};

static const PackedTiles *packed_tiles(void) {
    int has_vnni = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl");
    return has_vnni ? &vnni_set : &avx2_set;
}

static inline int64_t blocks_of(int64_t num_in) { return (num_in + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS; }
static inline int64_t groups_of(int64_t num_out) { return (num_out + GROUP - 1) / GROUP; }

/* 32 numbers as codes of 8 bits. What is no finite number makes all of them none. */
AVX2 static inline void round_block(const void *tokens, int kind, int64_t place, int offset, TokenBlock *block) {
    __m256 numbers[4], most = _mm256_setzero_ps(), nothing = _mm256_setzero_ps();
    UNROLLED for (int i = 0; i < 4; i++) {
        numbers[i] = eight_at(tokens, kind, place + 8 * i);
        most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), numbers[i]));
        nothing = _mm256_fmadd_ps(numbers[i], _mm256_setzero_ps(), nothing);
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    float largest = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    __m256i is_none = _mm256_castps_si256(_mm256_cmp_ps(nothing, nothing, _CMP_UNORD_Q));
    __m256 factor = _mm256_set1_ps(largest > 0.0f ? 127.0f / largest : 0.0f);
    __m256i codes[4];
    UNROLLED for (int i = 0; i < 4; i++) codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(numbers[i], factor));
    int32_t sums[2];
    UNROLLED for (int half = 0; half < 2; half++) {
        __m256i words = _mm256_packs_epi32(codes[2 * half], codes[2 * half + 1]); /* 0-3, 8-11, 4-7, 12-15 */
        words = _mm256_permute4x64_epi64(words, 0xD8);
        __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
        _mm_storeu_si128((__m128i *)(block->codes + 16 * half), _mm_packs_epi16(low, high));
        __m128i sum = _mm_madd_epi16(_mm_add_epi16(low, high), _mm_set1_epi16(1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
        sums[half] = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
    }
    block->scale = _mm256_testz_si256(is_none, is_none) ? largest / 127.0f : NAN;
    block->total = block->scale * (float)(sums[0] + sums[1]);
    block->starts[0] = -offset * sums[0], block->starts[1] = -offset * sums[1];
    block->start = block->starts[0] + block->starts[1];
}

/* The same of fewer numbers, padded with zeros. */
AVX2 static void round_rest(const void *tokens, int kind, int64_t place, int64_t count, int offset, TokenBlock *block) {
    float padded[BLOCK_COLUMNS] = {0};
    for (int64_t i = 0; i < count; i++) padded[i] = number_at(tokens, kind, place + i);
    round_block(padded, FP32, 0, offset, block);
}

/* Round some tokens; in a tile, each block's come one after another. */
AVX2 static inline void round_tokens(const PackedJob *job, int kind, int most, int offset, int64_t first,
                                     int64_t count) {
    int64_t num_whole = job->num_in / BLOCK_COLUMNS, num_left = job->num_in % BLOCK_COLUMNS;
    int64_t num_blocks = blocks_of(job->num_in);
    for (int64_t t = 0; t < count; t++) {
        int64_t tile = t / most * most, width = min_of(count - tile, most), place = (first + t) * job->num_in;
        TokenBlock *block = job->blocks + tile * num_blocks + (t - tile);
        for (int64_t b = 0; b < num_whole; b++, block += width, place += BLOCK_COLUMNS)
            round_block(job->tokens, kind, place, offset, block);
        if (num_left) round_rest(job->tokens, kind, place, num_left, offset, block);
    }
}

/* Round a token's sums for up to 16 outputs, with the bias. */
AVX2 static inline void put_group(const PackedJob *job, int64_t token, int64_t output, const float *sums) {
    int64_t place = token * job->num_out + output, count = min_of(job->num_out - output, GROUP), o = 0;
    for (; o + EIGHT <= count; o += EIGHT) {
        __m256 eight = _mm256_loadu_ps(sums + o);
        if (job->bias != NULL) eight = _mm256_add_ps(eight, eight_at(job->bias, job->kind, output + o));
        put_eight(job->out, job->kind, place + o, eight);
    }
    for (; o < count; o++) {
        float bias = job->bias == NULL ? 0.0f : number_at(job->bias, job->kind, output + o);
        put_number(job->out, job->kind, place + o, sums[o] + bias);
    }
}

typedef struct {
    PackedJob *job;
    const PackedTiles *set;
    int64_t first, count; /* tokens */
} Part;

/* What one thread does: groups of rows, a few at a time, with all tokens. */
static void work(void *argument) {
    const Part *part = argument;
    PackedJob *job = part->job;
    const PackedTiles *set = part->set;
    int64_t num_blocks = blocks_of(job->num_in), num_groups = groups_of(job->num_out), most = set->most;
    int64_t code_bytes = num_blocks * code_bytes_of(job->format), scale_bytes = num_blocks * scale_bytes_of(job->format);
    const uint8_t *all_scales = job->weights + num_groups * code_bytes;
    for (;;) {
        int64_t group = __atomic_fetch_add(job->next, job->num_taken, __ATOMIC_RELAXED);
        if (group >= num_groups) return;
        for (int64_t end = min_of(group + job->num_taken, num_groups); group < end; group++) {
            const uint8_t *codes = job->weights + group * code_bytes, *scales = all_scales + group * scale_bytes;
            for (int64_t tile = 0; tile < part->count; tile += most) {
                int64_t width = min_of(part->count - tile, most);
                float sums[EIGHT * GROUP];
                set->tiles[job->format][width - 1](codes, scales, job->blocks + tile * num_blocks, num_blocks,
                                                   tile ? 0 : AHEAD, sums);
                for (int64_t t = 0; t < width; t++)
                    put_group(job, part->first + tile + t, group * GROUP, sums + t * GROUP);
            }
        }
    }
}

/* Round `part->count` tokens from `part->first` on. */
AVX2 static void round_part(const Part *part) {
    PackedJob *job = part->job;
    int most = part->set->most, offset = job->format == Q8_0 ? part->set->eight_offset : offset_of(job->format);
    if (job->kind == FP32) round_tokens(job, FP32, most, offset, part->first, part->count);
    else if (job->kind == BF16) round_tokens(job, BF16, most, offset, part->first, part->count);
    else round_tokens(job, FP16, most, offset, part->first, part->count);
}

static int begin_packed(PackedJob *job, int64_t at_once, unsigned num_threads) {
    job->blocks = malloc((size_t)(at_once * blocks_of(job->num_in)) * sizeof(TokenBlock));
    job->num_taken = groups_of(job->num_out) / (4 * num_threads) + 1;
    return job->blocks != NULL;
}

AVX2 int run_packed(PackedJob *job, Team *team, unsigned num_threads) {
    int64_t at_once = min_of(job->num_tokens, TOKENS_AT_ONCE), next;
    if (!begin_packed(job, at_once, num_threads)) return 0;
    job->next = &next;
    Part part = {job, packed_tiles(), 0, 0};
    for (; part.first < job->num_tokens; part.first += part.count) {
        part.count = min_of(job->num_tokens - part.first, at_once);
        round_part(&part);
        next = 0;
        if (num_threads > 1) team(work, &part, num_threads, 0);
        else work(&part);
    }
    free(job->blocks);
    return 1;
}

AVX2 int share_packed(PackedJob *job, unsigned num_threads) {
    if (!begin_packed(job, job->num_tokens, num_threads)) return 0;
    Part part = {job, packed_tiles(), 0, job->num_tokens};
    round_part(&part);
    work(&part);
    free(job->blocks);
    return 1;
}

/* A row's number in a column. */
AVX2 static float number_of(const uint8_t *codes, const uint8_t *scales, int format, int64_t block, int lane, int place) {
    int line = place / 4, byte = 4 * lane + place % 4;
    codes += block * code_bytes_of(format);
    if (format == Q8_0) {
        const uint16_t *half = (const uint16_t *)(scales + block * 32) + lane;
        return _cvtsh_ss(*half) * (float)(codes[line * LINE_BYTES + byte] - 128);
    }
    int code = codes[line % 4 * LINE_BYTES + byte] >> (line < 4 ? 0 : 4) & 0x0F;
    if (format == Q6_K) code |= (codes[(4 + line / 4) * LINE_BYTES + byte] >> 2 * (line % 4) & 0x03) << 4;
    float scale[GROUP], least[GROUP] = {0};
    for (int first = 0; first < GROUP; first += EIGHT) {
        _mm256_storeu_ps(scale + first, scale_of_avx2(format, scales, block, place / 16, first));
        if (format == Q4_1 || format == Q4_K)
            _mm256_storeu_ps(least + first, least_of_avx2(format, scales, block, first));
    }
    return scale[lane] * (float)(code - offset_of(format)) + least[lane];
}

PyObject *core_packed_linear(PyObject *Py_UNUSED(module), PyObject *args) {
    PackedJob job = {0};
    unsigned long long tokens, weights, bias, out, team;
    long long num_tokens, num_out, num_in;
    unsigned num_threads;
    if (!PyArg_ParseTuple(args, "KKKKLLLiiIK", &tokens, &weights, &bias, &out, &num_tokens, &num_out, &num_in, &job.kind,
                          &job.format, &num_threads, &team))
        return NULL;
    if (job.kind < FP32 || job.kind > FP16 || job.format < 0 || job.format >= NUM_FORMATS || num_in < 1 ||
        tiles_for(FP32, 8) == NULL || num_threads < 1 || (num_threads > 1 && team == 0)) {
        PyErr_SetString(PyExc_ValueError, "no product of such numbers, or on this processor");
        return NULL;
    }
    job.tokens = (const void *)(uintptr_t)tokens;
    job.weights = (const uint8_t *)(uintptr_t)weights;
    job.bias = (const void *)(uintptr_t)bias;
    job.out = (void *)(uintptr_t)out;
    job.num_tokens = num_tokens, job.num_out = num_out, job.num_in = num_in;
    int is_done;
    Py_BEGIN_ALLOW_THREADS
    is_done = run_packed(&job, (Team *)(uintptr_t)team, num_threads);
    Py_END_ALLOW_THREADS
    if (!is_done) return PyErr_NoMemory();
    return new_none();
}

AVX2 static void put_rows(const uint8_t *weights, int format, int64_t num_out, int64_t num_in, const int64_t *rows,
                          int64_t count, void *out, int kind) {
    int64_t num_blocks = blocks_of(num_in);
    int64_t code_bytes = num_blocks * code_bytes_of(format), scale_bytes = num_blocks * scale_bytes_of(format);
    const uint8_t *all_scales = weights + groups_of(num_out) * code_bytes;
    for (int64_t r = 0; r < count; r++) {
        int64_t group = rows[r] / GROUP;
        for (int64_t i = 0; i < num_in; i++)
            put_number(out, kind, r * num_in + i,
                       number_of(weights + group * code_bytes, all_scales + group * scale_bytes, format,
                                 i / BLOCK_COLUMNS, (int)(rows[r] % GROUP), (int)(i % BLOCK_COLUMNS)));
    }
}

PyObject *core_packed_rows(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long weights, rows, out;
    long long num_out, num_in, count;
    int format, kind;
    if (!PyArg_ParseTuple(args, "KKKLLLii", &rows, &weights, &out, &count, &num_out, &num_in, &kind, &format)) return NULL;
    const int64_t *ids = (const int64_t *)(uintptr_t)rows;
    for (int64_t r = 0; r < count; r++)
        if (ids[r] < 0 || ids[r] >= num_out) {
            PyErr_SetString(PyExc_IndexError, "index out of range in self");
            return NULL;
        }
    put_rows((const uint8_t *)(uintptr_t)weights, format, num_out, num_in, ids, count, (void *)(uintptr_t)out, kind);
    return new_none();
}
#endif
