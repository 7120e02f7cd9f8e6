// SPDX-License-Identifier: Apache-2.0
//
// Verbs that run while the process ends, when the main thread's thread_local objects and the static objects made in
// main are gone: in the destructor of a static object, and in a function given to atexit.
#include <cstdlib>
#include <functional>

#include "breccia/breccia.h"
#include "breccia/gptq.hpp"
#include "breccia/transpose.hpp"
#include "support.hpp"

namespace breccia {
namespace {

std::function<void()>& at_end() {
    static auto& verb = *new std::function<void()>;
    return verb;
}
struct Ending {
    ~Ending() {
        if (at_end()) at_end()();
    }
};
const Ending ending;  // made before anything that a verb makes, and so destroyed after it

class ProcessEnd : public testing::Test {
protected:
    ~ProcessEnd() override { set_num_threads(1); }

    // The verb once or twice in a process, then again while that ends.
    static void expect_end(const std::string& name, const std::function<void()>& verb) {
        SCOPED_TRACE(name);
        shutdown();  // a process with one thread is forked without a warning
        EXPECT_EXIT(
            {
                verb();
                verb();
                at_end() = [&] {
                    verb();
                    verb();
                };
                std::exit(0);
            },
            testing::ExitedWithCode(0), "");
    }
};

TEST_F(ProcessEnd, EveryVerbMayRun) {
    constexpr std::int64_t rows = 64, cols = 256;
    std::vector<float> x = heavy_tailed(rows, cols, 1, 1), moments(cols * cols, 0.25F);
    for (std::int64_t i = 0; i < cols; ++i) moments[static_cast<std::size_t>(i * cols + i)] = 2;
    const Array array = array_of(x, {rows, cols}), one = array_of(x, {1, cols});
    Sample cases;
    for (const int threads : {1, 3}) {
        set_num_threads(threads);
        for (const RecipeRow& row : catalogue()) {
            if (!cases.takes()) continue;
            const Recipe recipe = make_recipe(row.name);
            const ScaledTensor scaled = cast(array, recipe);
            expect_end(std::string(row.name), [&] {
                cast(array, recipe);
                dequantize(scaled);
                requantize(scaled, recipes::nvfp4{});
                linear(one, scaled);
                linear(array, PreparedWeight(scaled));
                compare(array, scaled);
                if (!recipe.is_expanded()) gptq(array, array_of(moments, {cols, cols}), recipe);
                if (row.name == "MXFP8BlockScaling") transpose(scaled);
            });
        }
    }
    expect_end("a message of the C functions", [] {
        if (breccia_set_threads(-1) != BRECCIA_VALUE_ERROR) std::abort();
        if (std::string(breccia_last_message()) != "count must be >= 1, got -1") std::abort();
    });
}

TEST_F(ProcessEnd, AMessageIsCutOffWhereItIsTooLong) {
    breccia_recipe* recipe = nullptr;
    EXPECT_EQ(breccia_recipe_new(std::string(5000, 'x').c_str(), nullptr, &recipe), BRECCIA_VALUE_ERROR);
    EXPECT_EQ(std::string(breccia_last_message()).size(), 1023U);
}

}  // namespace
}  // namespace breccia
