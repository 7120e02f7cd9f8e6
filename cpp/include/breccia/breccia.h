/* SPDX-License-Identifier: Apache-2.0
 *
 * The verbs in C, for other languages: plain pointers, no allocation of results, no exceptions. This is interface 1:
 * what stands here does not change but by addition, whatever the version of the library, and the shared library
 * libbreccia_c.so.1 has these functions alone.
 *
 * Every struct begins with its size, which the program sets to sizeof: members that a later header adds at the end count
 * as zero for a program that does not know them, and a library that does not know them refuses what is not zero.
 *
 * Matrices are C-contiguous, (rows, columns), those of a batch one after another. Memory is the caller's, at a multiple
 * of the size of what it holds; what is read is not written to, and nothing is kept after a call but a recipe, which
 * needs no memory of the caller's, and a prepared weight, which does. Both are immutable: any threads may use them at
 * once. Every function that returns breccia_status gives BRECCIA_OK, or the class of the mistake, whose sentence
 * breccia_last_message() then has.
 */
#ifndef BRECCIA_C_H
#define BRECCIA_C_H

#include <stddef.h>
#include <stdint.h>

#if !defined(BRECCIA_SHARED)
#define BRECCIA_C_API
#elif defined(_WIN32) && defined(BRECCIA_C_BUILDING)
#define BRECCIA_C_API __declspec(dllexport)
#elif defined(_WIN32)
#define BRECCIA_C_API __declspec(dllimport)
#else
#define BRECCIA_C_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Names are those of C: types in lower case, constants in capitals.
 * NOLINTBEGIN(readability-identifier-naming) */
/** What a call came to: one of the constants below. */
typedef int32_t breccia_status;
enum {
    BRECCIA_OK = 0,
    BRECCIA_VALUE_ERROR = 1, /**< a wrong value, size or null pointer */
    BRECCIA_TYPE_ERROR = 2,  /**< a wrong type of numbers or of a recipe's field */
    BRECCIA_NO_MEMORY = 3,
    BRECCIA_INTERNAL_ERROR = 4
};

/** Types of numbers. Float16 and bfloat16 are IEEE binary16 and the upper half of a float, two bytes each. */
typedef int32_t breccia_dtype;
enum { BRECCIA_FLOAT32 = 0, BRECCIA_FLOAT64 = 1, BRECCIA_FLOAT16 = 2, BRECCIA_BFLOAT16 = 3 };

/** The sentence of the last error of this thread, of at most 1023 bytes; valid until its next call. "" where there was
 * none. */
BRECCIA_C_API const char *breccia_last_message(void);

/** "0.4.0", of the library that is linked. */
BRECCIA_C_API const char *breccia_version(void);

/** A recipe, made and given back by the functions below. */
typedef struct breccia_recipe breccia_recipe;

/** A recipe by name ("nvfp4", "MXFP8BlockScaling"). `fields` is NULL, or text such as "two_level=false" or
 * "group_size=32,scale_dtype=bf16". Give it back with breccia_recipe_free. */
BRECCIA_C_API breccia_status breccia_recipe_new(const char *name, const char *fields, breccia_recipe **recipe);
/** NULL is let through. */
BRECCIA_C_API void breccia_recipe_free(breccia_recipe *recipe);

/** Bytes of each part of a matrix or a batch; 0 for a part that the recipe has not, which is given as NULL even where
 * an allocator returns a pointer for 0 bytes. */
typedef struct breccia_part_bytes {
    size_t size;          /**< sizeof(breccia_part_bytes) */
    int64_t data;         /**< codes */
    int64_t scale;        /**< scales of blocks */
    int64_t zero_point;   /**< zero points of blocks; of recipes with exponents these, 16-bit floats */
    int64_t global_scale; /**< one float */
} breccia_part_bytes;
/** Of a matrix (rows, columns) by that recipe, `batch` 0, or of a batch of so many. */
BRECCIA_C_API breccia_status breccia_part_sizes(const breccia_recipe *recipe, int64_t batch, int64_t rows,
                                                int64_t columns, breccia_part_bytes *sizes);

/** How scales lie in memory. */
typedef int32_t breccia_scale_form;
enum {
    BRECCIA_SCALES_OF_RECIPE = 0, /**< as breccia_cast writes them */
    /** float, whatever the recipe's type. Where that is a code (E8M0, E4M3) each must be the value of one, else the
     * call is refused: DeepSeek's scales are powers of two in float. */
    BRECCIA_SCALES_FLOAT32 = 1
};

/** A weight laid out for many products, made and given back by the functions below. */
typedef struct breccia_weight breccia_weight;

/** What is read: numbers, where `recipe` is NULL, rows * columns of type `dtype`, which have no part but `data`.
 * Otherwise codes, with the parts that breccia_part_sizes names; `dtype` is not looked at. A part that there is none of
 * must be NULL. */
typedef struct breccia_matrix {
    size_t size;                    /**< sizeof(breccia_matrix) */
    const breccia_recipe *recipe;   /**< NULL: numbers */
    const breccia_weight *prepared; /**< if not NULL the matrix is that weight: of the rest `transposed` counts alone */
    int64_t batch;                  /**< matrices, one after another; 0: one, without an axis for the batch */
    int64_t rows;                   /**< of each matrix, as stored */
    int64_t columns;                /**< as stored, in elements */
    breccia_dtype dtype;            /**< of numbers */
    breccia_scale_form scale_form;  /**< of codes */
    int32_t transposed;             /**< not 0: each stands for its transpose; of operands of breccia_matmul only */
    int32_t global_scales;          /**< not 0: each matrix of the batch has a global scale of its own */
    const void *data;               /**< numbers or codes */
    const void *scale;              /**< scales of blocks */
    const void *zero_point;         /**< zero points of blocks, or their exponents */
    const void *global_scale;       /**< float: one for all, or as global_scales says */
} breccia_matrix;

/** What is written: as a breccia_matrix, with memory for each part that there is. */
typedef struct breccia_output {
    size_t size;                  /**< sizeof(breccia_output) */
    const breccia_recipe *recipe; /**< NULL: numbers */
    int64_t batch;                /**< matrices, one after another; 0: one, without an axis for the batch */
    int64_t rows;                 /**< of each matrix */
    int64_t columns;              /**< in elements */
    breccia_dtype dtype;          /**< of numbers */
    int32_t reserved;             /**< 0 */
    void *data;                   /**< numbers or codes */
    void *scale;                  /**< scales of blocks */
    void *zero_point;             /**< zero points of blocks, or their exponents */
    void *global_scale;           /**< one float, for all matrices */
} breccia_output;

/** How a cast departs from its recipe. */
typedef struct breccia_cast_options {
    size_t size; /**< sizeof(breccia_cast_options) */
    /** NULL, or what errors of each column count: numbers (1, columns), for each matrix of a batch or for all. Scales
     * are those of the least sum over all elements of importance * error^2; what is zero or no finite number takes the
     * mean of the others. */
    const breccia_matrix *importance;
    /** NULL, or the largest finite magnitudes of the larger tensor that x is a part of: one for recipes of one scale
     * per tensor or of two levels, one to each row for recipes of one scale per row. */
    const float *amax;
    int64_t amax_count;  /**< how many there are */
    int32_t stochastic;  /**< not 0: round stochastically, by draws of `seed` and an element's place */
    int32_t reserved;    /**< 0 */
    uint64_t seed;       /**< of these draws */
    int64_t offset;      /**< the place of x's first element in a larger tensor, for the draws */
    int64_t row_length;  /**< of the larger tensor's rows; 0: those of x */
} breccia_cast_options;

/** How activations enter a product. */
typedef int32_t breccia_precision;
enum {
    BRECCIA_EXACT = 0, /**< as they are */
    BRECCIA_FAST = 1   /**< rounded to bfloat16 where that is quicker: an error of up to 2^-8 |a||b| per product */
};

/** How a product is made. */
typedef struct breccia_product_options {
    size_t size;                 /**< sizeof(breccia_product_options) */
    breccia_precision precision; /**< of the activations */
    int32_t reserved;            /**< 0 */
} breccia_product_options;

/* Where `options` is NULL, all of them are zero. */

/** x: numbers; out: codes, of the same shape. */
BRECCIA_C_API breccia_status breccia_cast(const breccia_matrix *x, const breccia_output *out,
                                          const breccia_cast_options *options);
/** scaled: codes; out: numbers, of the same shape. */
BRECCIA_C_API breccia_status breccia_dequantize(const breccia_matrix *scaled, const breccia_output *out);
/** Both codes, of the same shape. */
BRECCIA_C_API breccia_status breccia_requantize(const breccia_matrix *scaled, const breccia_output *out);
/** a (M, K) @ b (K, N) into numbers (M, N); either operand of either kind. A batch meets a batch as large, or one
 * matrix. */
BRECCIA_C_API breccia_status breccia_matmul(const breccia_matrix *a, const breccia_matrix *b, const breccia_output *out,
                                            const breccia_product_options *options);
/** x (M, K) @ transpose of w (N, K) into numbers (M, N), plus `bias`, NULL or numbers (1, N). x and out may be batches;
 * w is one matrix. */
BRECCIA_C_API breccia_status breccia_linear(const breccia_matrix *x, const breccia_matrix *w,
                                            const breccia_matrix *bias, const breccia_output *out,
                                            const breccia_product_options *options);
/** Rows offsets[e] to offsets[e + 1] of x (T, K) @ transpose of matrix e of the batch w, codes (N, K), into the same
 * rows of numbers (T, N). `offsets`: w->batch + 1 numbers that do not fall, from 0 to at most T; rows past the last
 * become zero. */
BRECCIA_C_API breccia_status breccia_grouped_matmul(const breccia_matrix *x, const breccia_matrix *w,
                                                    const int64_t *offsets, const breccia_output *out,
                                                    const breccia_product_options *options);

/** Lays a weight of codes out for many products by few activations. Its parts stay in use: they must neither change nor
 * go before breccia_weight_free. */
BRECCIA_C_API breccia_status breccia_prepare(const breccia_matrix *w, breccia_weight **prepared);
/** NULL is let through. */
BRECCIA_C_API void breccia_weight_free(breccia_weight *prepared);

/** Threads that a call may use, its own included; results do not depend on it. At first BRECCIA_NUM_THREADS of the
 * environment, or as many as the process may run on. */
BRECCIA_C_API breccia_status breccia_set_threads(int32_t count);
/** Ends the threads that calls have left waiting, for a program that unloads the library; the next call starts them
 * again. No other call may be at work. */
BRECCIA_C_API breccia_status breccia_shutdown(void);
/** How many that are; 0 where BRECCIA_NUM_THREADS is no count, which breccia_last_message() then says. */
BRECCIA_C_API int32_t breccia_threads(void);

/* NOLINTEND(readability-identifier-naming) */

#ifdef __cplusplus
}
#endif

#endif
